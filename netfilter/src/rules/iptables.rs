//! The rules in iptables and ip6tables, whose restore commands change a table in one step.
//!
//! One chain per member, in the raw table: it comes before all others and before connections are tracked, and a packet that
//! the gate lets through goes on to the user's own rules.

use super::names::{CHAIN_PREFIX, chain};
use super::tool::{find, run};
use super::{Marks, MemberRules, RulesError, Topology};
use std::fmt::Write;
use std::path::PathBuf;

const PROBE_CHAIN: &str = "TL-PROBE";
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    V4,
    V6,
}

/// The rules of this packet filter.
pub(super) const NAME: &str = "iptables-nft";

/// iptables on top of nftables. Its older implementation ("legacy") is not used: the kernel tells nobody of changes there.
#[derive(Clone, Debug)]
pub(super) struct Iptables {
    v4: Commands,
    v6: Commands,
    queues: bool,
    physdev: bool,
}

#[derive(Clone, Debug)]
struct Commands {
    family: Family,
    save: PathBuf,
    restore: PathBuf,
}

impl Iptables {
    /// By its own name, or as the system's iptables. `Err`: only another implementation of iptables is here.
    pub(super) fn find() -> Result<Option<Iptables>, RulesError> {
        let Some(prefix) = [NAME, "iptables"].into_iter().find(|name| find(name).is_some()) else {
            return Ok(None);
        };
        let tool = find(prefix).expect("just found");
        check_version(&run(&tool, &["--version"], "", "say its version")?)?;
        let commands = |family, prefix: &str| {
            Some(Commands {
                family,
                save: find(&format!("{prefix}-save"))?,
                restore: find(&format!("{prefix}-restore"))?,
            })
        };
        let v4 = commands(Family::V4, prefix);
        let v6 = commands(Family::V6, &prefix.replacen("iptables", "ip6tables", 1));
        Ok(v4.zip(v6).map(|(v4, v6)| Iptables { v4, v6, queues: false, physdev: false }))
    }

    /// Whether it can queue, once it was looked at.
    pub(super) fn queues(&self) -> bool {
        self.queues
    }

    /// Finds out whether it can queue, and if not, why.
    pub(super) fn look(&mut self) -> Option<RulesError> {
        let tried = self.try_queue();
        self.queues = tried.is_ok();
        tried.err()
    }

    /// Builds and removes a scratch chain with the rules that will be needed, in one step.
    fn try_queue(&mut self) -> Result<(), RulesError> {
        let probe = |commands: &Commands, matching: &str, doing| {
            let script = format!(
                "*raw\n:{PROBE_CHAIN} - [0:0]\n\
                 -A {PROBE_CHAIN} {matching} -j NFQUEUE --queue-num 0\n\
                 -F {PROBE_CHAIN}\n-X {PROBE_CHAIN}\nCOMMIT\n"
            );
            commands.restore(&script, doing)
        };
        let doing = "queue packets (NFQUEUE in the raw table)";
        probe(&self.v4, "", doing)?;
        probe(&self.v6, "", doing)?;
        let physdev = |c| probe(c, "-m physdev --physdev-in probe", "match bridge ports").is_ok();
        self.physdev = physdev(&self.v4) && physdev(&self.v6);
        Ok(())
    }

    pub(super) fn install(&self, rules: &MemberRules) -> Result<(), RulesError> {
        if rules.topology == Topology::Bridged && !self.physdev {
            return Err(RulesError::NoPhysdev { tool: NAME.to_owned() });
        }
        check_way(rules.topology)?;
        for commands in [&self.v4, &self.v6] {
            let saved = commands.save()?;
            let script = install_script(rules, &saved);
            commands.restore(&script, "install the rules")?;
        }
        Ok(())
    }

    /// The member's rules, and a complaint if another rule has come before them.
    pub(super) fn listing(&self, rules: &MemberRules) -> Result<Vec<String>, RulesError> {
        let mut lines = Vec::new();
        for commands in [&self.v4, &self.v6] {
            let saved = commands.save()?;
            if let Some(line) = comes_before(&saved, &rules.member) {
                return Err(RulesError::Changed {
                    tool: NAME.to_owned(),
                    what: format!("\"{line}\" in the raw table comes before them"),
                });
            }
            let family = format!("{:?}", commands.family);
            lines.extend(own_lines(&saved, &rules.member).map(|line| format!("{family} {line}")));
        }
        Ok(lines)
    }

    /// Whether an earlier run has left rules of this member.
    pub(super) fn has_left(&self, member: &str) -> Result<bool, RulesError> {
        for commands in [&self.v4, &self.v6] {
            if jumps(&commands.save()?, member).next().is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    pub(super) fn remove(&self, member: &str) -> Result<(), RulesError> {
        for commands in [&self.v4, &self.v6] {
            let saved = commands.save()?;
            if let Some(script) = remove_script(member, &saved) {
                commands.restore(&script, "remove the rules")?;
            }
        }
        Ok(())
    }
}

impl Commands {
    fn save(&self) -> Result<String, RulesError> {
        run(&self.save, &["-t", "raw"], "", "list the raw table")
    }

    fn restore(&self, script: &str, doing: &'static str) -> Result<(), RulesError> {
        run(&self.restore, &["--noflush"], script, doing).map(drop)
    }
}

/// Only the implementation that uses nftables says `nf_tables`.
fn check_version(version: &str) -> Result<(), RulesError> {
    if version.contains("nf_tables") {
        return Ok(());
    }
    Err(RulesError::LegacyIptables { version: version.trim().to_owned() })
}

/// Whether packets come by iptables at all.
pub(super) fn check_way(topology: Topology) -> Result<(), RulesError> {
    if topology == Topology::Routed {
        return Ok(());
    }
    for sysctl in ["net.bridge.bridge-nf-call-iptables", "net.bridge.bridge-nf-call-ip6tables"] {
        let path = format!("/proc/sys/{}", sysctl.replace('.', "/"));
        let found = std::fs::read_to_string(path).unwrap_or_else(|_| "missing".to_owned());
        let found = found.trim().to_owned();
        if found != "1" {
            return Err(RulesError::BridgeNetfilter { sysctl, found });
        }
    }
    Ok(())
}

/// Naming a chain empties it, so what follows is the whole of it. Old jumps go in the same step.
fn install_script(rules: &MemberRules, saved: &str) -> String {
    let chain = chain(&rules.member);
    let interface = match rules.topology {
        Topology::Routed => format!("-i {}", rules.interface),
        Topology::Bridged => format!("-m physdev --physdev-in {}", rules.interface),
    };
    let mut script = format!("*raw\n:{chain} - [0:0]\n");
    // What its kernel programs have let pass takes no step more than it must.
    if let Some(Marks { mask, pass }) = rules.marks {
        let not_passed = format!("-m mark ! --mark {pass:#x}/{mask:#x}");
        line(
            &mut script,
            &format!("-A {chain} {not_passed} -j NFQUEUE --queue-num {}", rules.queue),
        );
        line(&mut script, &format!("-A {chain} -j MARK --set-xmark 0x0/{mask:#x}"));
    } else {
        line(&mut script, &format!("-A {chain} -j NFQUEUE --queue-num {}", rules.queue));
    }
    for jump in jumps(saved, &rules.member) {
        line(&mut script, &jump.replacen("-A", "-D", 1));
    }
    line(&mut script, &format!("-I PREROUTING 1 {interface} -j {chain}"));
    line(&mut script, "COMMIT");
    script
}

/// `None`: there is nothing to remove.
fn remove_script(member: &str, saved: &str) -> Option<String> {
    let chain = chain(member);
    if !saved.contains(&format!(":{chain} ")) {
        return None;
    }
    let mut script = "*raw\n".to_owned();
    for jump in jumps(saved, member) {
        line(&mut script, &jump.replacen("-A", "-D", 1));
    }
    for command in ["-F", "-X"] {
        line(&mut script, &format!("{command} {chain}"));
    }
    line(&mut script, "COMMIT");
    Some(script)
}

fn line(script: &mut String, line: &str) {
    writeln!(script, "{line}").expect("writing to a string");
}

/// The rules that lead into the member's chain.
fn jumps<'a>(saved: &'a str, member: &str) -> impl Iterator<Item = &'a str> + use<'a> {
    let target = format!(" -j {}", chain(member));
    saved.lines().filter(move |line| line.starts_with("-A ") && line.ends_with(&target))
}

/// The jumps and the chain's content.
fn own_lines<'a>(saved: &'a str, member: &str) -> impl Iterator<Item = &'a str> + use<'a> {
    let chain = format!("-A {} ", chain(member));
    let content = saved.lines().filter(move |line| line.starts_with(&chain));
    jumps(saved, member).chain(content)
}

/// A rule of somebody else's that decides about packets before the member's jump does.
fn comes_before<'a>(saved: &'a str, member: &str) -> Option<&'a str> {
    saved
        .lines()
        .filter(|line| line.starts_with("-A PREROUTING "))
        .take_while(|line| jumps(line, member).next().is_none())
        .find(|line| !line.contains(&format!(" -j {CHAIN_PREFIX}")))
}

#[cfg(test)]
mod tests {
    use super::super::tests::rules;
    use super::*;

    fn saved() -> String {
        let chain = chain("web");
        format!(
            "*raw\n:PREROUTING ACCEPT [9:9]\n:{chain} - [0:0]\n\
             -A PREROUTING -i other -j {}\n-A PREROUTING -i old -j {chain}\n-A PREROUTING -j ACCEPT\n\
             -A {chain} -j NFQUEUE --queue-num 7\nCOMMIT\n",
            super::chain("other")
        )
    }

    #[test]
    fn an_iptables_that_does_not_use_nftables_is_refused_by_its_version() {
        check_version("iptables v1.8.9 (nf_tables)\n").unwrap();
        for legacy in ["iptables v1.8.9 (legacy)\n", "iptables v1.6.1\n"] {
            let told = check_version(legacy).unwrap_err().to_string();
            assert!(told.contains(legacy.trim()) && told.contains("iptables-nft"), "{told}");
        }
    }

    #[test]
    fn a_stale_jump_goes_in_the_same_step_in_which_the_new_one_comes() {
        let chain = chain("web");
        let script = install_script(&rules(Topology::Routed), &saved());
        let at = |line: &str| script.find(&format!("{line}\n")).expect(line);
        assert!(at(&format!("-D PREROUTING -i old -j {chain}")) < at("COMMIT"));
        assert!(at(&format!("-I PREROUTING 1 -i tap0 -j {chain}")) < at("COMMIT"));
        assert!(at(&format!("-A {chain} -j NFQUEUE --queue-num 40")) < at("COMMIT"));
        assert!(!script.contains("other"), "{script}");
        assert!(!script.contains("bypass") && !script.contains("RETURN"), "{script}");
    }

    #[test]
    fn marked_packets_do_not_come_to_the_queue_and_lose_the_mark() {
        for topology in [Topology::Routed, Topology::Bridged] {
            let marks = Some(Marks { mask: 0xff0, pass: 0x120 });
            let script = install_script(&MemberRules { marks, ..rules(topology) }, "");
            let chain = chain("web");
            let content: Vec<_> =
                script.lines().filter(|line| line.starts_with(&format!("-A {chain} "))).collect();
            assert_eq!(
                content,
                [
                    format!("-A {chain} -m mark ! --mark 0x120/0xff0 -j NFQUEUE --queue-num 40"),
                    format!("-A {chain} -j MARK --set-xmark 0x0/0xff0"),
                ]
            );
        }
    }

    #[test]
    fn removal_takes_what_is_ours_and_only_that() {
        let script = remove_script("web", &saved()).unwrap();
        assert!(script.contains("-D PREROUTING -i old"));
        assert!(script.contains(&format!("-X {}", chain("web"))));
        assert!(!script.contains("other") && !script.contains("ACCEPT"), "{script}");
        assert_eq!(remove_script("nobody", &saved()), None);
    }

    #[test]
    fn a_rule_ahead_of_ours_is_noticed_unless_it_is_another_members() {
        assert_eq!(comes_before(&saved(), "web"), None);
        let ahead =
            saved().replacen("-A PREROUTING -i", "-A PREROUTING -j ACCEPT\n-A PREROUTING -i", 1);
        assert_eq!(comes_before(&ahead, "web"), Some("-A PREROUTING -j ACCEPT"));
    }
}
