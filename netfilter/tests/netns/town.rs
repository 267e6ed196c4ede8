//! Two guests of one group, `web` and `db`, and a client outside, as network namespaces.
//!
//! ```text
//! one bridge    web 10.71.0.2, db 10.71.0.3, client 10.71.0.4: ports of br0 10.71.0.1
//! one router    web 10.71.1.2 ── host ── db 10.71.2.2, client 10.71.3.2
//! two hosts     web 10.71.1.2 ── host ══ LAN ══ other host ── db 10.71.2.2; the client at host
//! ```
//! The same with fd71:0:0:N::.

use crate::lab::{in_namespace, quiet, run};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

static NEXT: AtomicU32 = AtomicU32::new(0);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    OneBridge,
    OneRouter,
    TwoHosts,
}

impl Plan {
    pub const ALL: [Plan; 3] = [Plan::OneBridge, Plan::OneRouter, Plan::TwoHosts];

    fn addresses(self, who: &str) -> (&'static str, &'static str) {
        match (self, who) {
            (Plan::OneBridge, "web") => ("10.71.0.2", "fd71::2"),
            (Plan::OneBridge, "db") => ("10.71.0.3", "fd71::3"),
            (Plan::OneBridge, _) => ("10.71.0.4", "fd71::4"),
            (_, "web") => ("10.71.1.2", "fd71:0:0:1::2"),
            (_, "db") => ("10.71.2.2", "fd71:0:0:2::2"),
            _ => ("10.71.3.2", "fd71:0:0:3::2"),
        }
    }
}

pub struct Town {
    prefix: String,
    pub plan: Plan,
    /// Where P is pinned: mounted by the gate, removed with this value.
    pin: PathBuf,
}

impl Town {
    pub fn new(plan: Plan) -> Town {
        let nth = NEXT.fetch_add(1, Ordering::Relaxed);
        let prefix = format!("tlg{}t{nth}", std::process::id());
        let pin = std::env::temp_dir().join(&prefix);
        std::fs::create_dir(&pin).expect("a directory");
        let town = Town { prefix, plan, pin };
        let (web, db, client) = (town.ns("web"), town.ns("db"), town.ns("client"));
        let (host, other) = (town.ns("host"), town.ns("other"));
        let mut script = String::new();
        for ns in [&web, &db, &client, &host, &other] {
            script += &format!("ip netns add {ns}; ip -n {ns} link set lo up\n");
        }
        let second = if plan == Plan::TwoHosts { &other } else { &host };
        for (guest, at, port) in [(&web, &host, "w0"), (&db, second, "d0"), (&client, &host, "c0")]
        {
            script += &format!(
                "ip -n {at} link add {port} type veth peer name e0 netns {guest}
                 ip -n {at} link set {port} up; ip -n {guest} link set e0 up\n"
            );
        }
        match plan {
            Plan::OneBridge => {
                script += &format!(
                    "ip -n {host} link add br0 type bridge
                     for p in w0 d0 c0; do ip -n {host} link set $p master br0; done
                     ip -n {host} link set br0 up
                     ip -n {host} addr add 10.71.0.1/24 dev br0
                     ip netns exec {host} sysctl -qw net.bridge.bridge-nf-call-iptables=1 \
                         net.bridge.bridge-nf-call-ip6tables=1\n"
                );
            }
            Plan::OneRouter | Plan::TwoHosts => {
                for (at, port, net) in [(&host, "w0", 1), (second, "d0", 2), (&host, "c0", 3)] {
                    script += &format!(
                        "ip -n {at} addr add 10.71.{net}.1/24 dev {port}
                         ip -n {at} addr add fd71:0:0:{net}::1/64 dev {port} nodad
                         ip netns exec {at} sysctl -qw net.ipv4.ip_forward=1 \
                             net.ipv6.conf.all.forwarding=1\n"
                    );
                }
            }
        }
        if plan == Plan::TwoHosts {
            script += &format!(
                "ip -n {host} link add lan type veth peer name lan netns {other}
                 ip -n {host} link set lan up; ip -n {other} link set lan up
                 ip -n {host} addr add 10.71.9.1/24 dev lan
                 ip -n {other} addr add 10.71.9.2/24 dev lan
                 ip -n {host} addr add fd71:0:0:9::1/64 dev lan nodad
                 ip -n {other} addr add fd71:0:0:9::2/64 dev lan nodad
                 ip -n {host} route add 10.71.2.0/24 via 10.71.9.2
                 ip -n {other} route add default via 10.71.9.1
                 ip -n {host} route add fd71:0:0:2::/64 via fd71:0:0:9::2
                 ip -n {other} route add default via fd71:0:0:9::1\n"
            );
        }
        for who in ["web", "db", "client"] {
            let (ns, (v4, v6)) = (town.ns(who), plan.addresses(who));
            script += &format!(
                "ip -n {ns} addr add {v4}/24 dev e0; ip -n {ns} addr add {v6}/64 dev e0 nodad\n"
            );
            if plan != Plan::OneBridge {
                let router = |address: &str| format!("{}1", &address[..address.len() - 1]);
                let (r4, r6) = (router(v4), router(v6));
                script += &format!(
                    "ip -n {ns} route add default via {r4}; ip -n {ns} route add default via {r6}\n"
                );
            }
        }
        run(&script);
        town
    }

    /// Takes a guest's interface away and makes it anew, as a VM does that stops and starts.
    pub fn remake(&self, who: &str) {
        self.remake_as(who, |at, port, ns| {
            run(&format!("ip -n {at} link add {port} type veth peer name e0 netns {ns}"));
        });
    }

    /// The same with another kind of cable: `make` gets the host's namespace, its interface's name and the
    /// guest's namespace, where it makes `e0`.
    pub fn remake_as(&self, who: &str, make: impl FnOnce(&str, &str, &str)) {
        let (port, net, at) = match (who, self.plan) {
            ("web", _) => ("w0", 1, self.ns("host")),
            (_, Plan::TwoHosts) => ("d0", 2, self.ns("other")),
            _ => ("d0", 2, self.ns("host")),
        };
        let (ns, (v4, v6)) = (self.ns(who), self.plan.addresses(who));
        run(&format!("ip -n {at} link del {port}"));
        make(&at, port, &ns);
        let mut script = format!(
            "ip -n {at} link set {port} up; ip -n {ns} link set e0 up
             ip -n {ns} addr add {v4}/24 dev e0; ip -n {ns} addr add {v6}/64 dev e0 nodad\n"
        );
        script += &match self.plan {
            Plan::OneBridge => format!("ip -n {at} link set {port} master br0\n"),
            Plan::OneRouter | Plan::TwoHosts => format!(
                "ip -n {at} addr add 10.71.{net}.1/24 dev {port}
                 ip -n {at} addr add fd71:0:0:{net}::1/64 dev {port} nodad
                 ip -n {ns} route add default via 10.71.{net}.1
                 ip -n {ns} route add default via fd71:0:0:{net}::1\n"
            ),
        };
        run(&script);
    }

    pub fn ns(&self, who: &str) -> String {
        format!("{}-{who}", self.prefix)
    }

    pub fn ip(&self, who: &str) -> IpAddr {
        self.plan.addresses(who).0.parse().expect("an address")
    }

    pub fn ip6(&self, who: &str) -> IpAddr {
        self.plan.addresses(who).1.parse().expect("an address")
    }

    /// Lets the hosts' side take packets with a tag on top of what the guests send.
    pub fn widen(&self, mtu: u32) {
        let links = [("host", "w0"), ("host", "br0"), ("host", "lan"), ("other", "lan")];
        let second = if self.plan == Plan::TwoHosts { "other" } else { "host" };
        for (at, link) in links.into_iter().chain([(second, "d0")]) {
            quiet(&["ip", "-n", &self.ns(at), "link", "set", link, "mtu", &mtu.to_string()]);
        }
    }

    /// Runs a shell command in a namespace.
    pub fn on(&self, who: &str, command: &str) -> String {
        let ns = self.ns(who);
        in_namespace(&ns, || run(command))
    }

    /// Where P is pinned.
    pub fn pin(&self) -> &Path {
        &self.pin
    }
}

impl Drop for Town {
    fn drop(&mut self) {
        for who in ["web", "db", "client", "host", "other"] {
            quiet(&["ip", "netns", "del", &self.ns(who)]);
        }
        quiet(&["umount", &self.pin.display().to_string()]);
        let _ = std::fs::remove_dir(&self.pin);
    }
}
