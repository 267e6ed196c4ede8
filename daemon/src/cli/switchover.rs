//! `tidelock switchover`: hands a group to the backup site, with nothing lost.

use super::human;
use crate::control::{Client, SwitchState, SwitchWish};
use anyhow::{Context, bail};
use clap::Args;
use serde_json::json;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

const LOOK_EVERY: Duration = Duration::from_millis(20);

/// How the guest is stopped, and for how long what is waited for.
#[derive(Clone, Debug, Args)]
pub struct Options {
    /// Stop the guests with this, once it is certain that the group can be switched: like "virsh shutdown db"
    ///
    /// It is run by sh. It may return before the guests have ended: they have when their disks are closed.
    #[arg(long, value_name = "COMMAND", conflicts_with = "guest_is_stopped")]
    pub stop_command: Option<String>,
    /// The guests do nothing any more that matters: cut them off from their disks if they have them open
    #[arg(long)]
    pub guest_is_stopped: bool,
    /// How long the guests may take to close their disks after --stop-command
    #[arg(long, value_name = "SPAN", default_value = "2m",
          value_parser = tidelock_config::duration_argument)]
    pub stop_timeout: Duration,
    /// How long the backup may take to get everything; after that the group goes on as before
    #[arg(long, value_name = "SPAN", default_value = "30s",
          value_parser = tidelock_config::duration_argument)]
    pub timeout: Duration,
    /// How long the other hosts of the group may take, once this one has nothing left to send; after that the group goes
    /// on as before
    #[arg(long, value_name = "SPAN", default_value = "5m",
          value_parser = tidelock_config::duration_argument)]
    pub wait_for_hosts: Duration,
    /// Print the outcome as JSON
    #[arg(long)]
    pub json: bool,
}

/// Switches over. Returns what to print.
pub fn run(socket: &Path, group: &str, options: &Options) -> anyhow::Result<String> {
    let mut client = Client::connect(socket)?;
    let wish = SwitchWish {
        guest_is_stopped: options.guest_is_stopped,
        check_only: true,
        timeout_ms: options.timeout.as_millis() as u64,
        others_ms: options.wait_for_hosts.as_millis() as u64,
    };
    // Before a guest is stopped for nothing.
    client.switchover(group, wish.clone())?;
    let began = Instant::now();
    if let Some(command) = &options.stop_command {
        stop_guests(&mut client, group, command, &wish, options.stop_timeout)?;
    }
    let stopped = began.elapsed();
    client.switchover(group, SwitchWish { check_only: false, ..wish })?;
    let mut awaited = Vec::new();
    let over = loop {
        match client.switched(group)? {
            SwitchState::Awaiting { members } if members != awaited && !members.is_empty() => {
                eprintln!(
                    "waiting for {}: run `tidelock switchover {group}` there, too",
                    members.join(", ")
                );
                awaited = members;
            }
            SwitchState::Draining | SwitchState::Awaiting { .. } | SwitchState::GivingUp => {
                sleep(LOOK_EVERY);
            }
            over => break over,
        }
    };
    let pause = began.elapsed();
    if options.json {
        let (stopped_ms, pause_ms) = (stopped.as_millis() as u64, pause.as_millis() as u64);
        let all = json!({
            "group": group, "switchover": over, "stopped_ms": stopped_ms, "pause_ms": pause_ms,
        });
        return Ok(all.to_string() + "\n");
    }
    Ok(words(group, &over, options.stop_command.is_some().then_some(stopped), pause))
}

fn stop_guests(
    client: &mut Client,
    group: &str,
    command: &str,
    wish: &SwitchWish,
    limit: Duration,
) -> anyhow::Result<()> {
    let until = Instant::now() + limit;
    let ended = Command::new("sh").args(["-c", command]).status();
    let ended = ended.with_context(|| format!("cannot run {command}"))?;
    if !ended.success() {
        bail!("`{command}` failed ({ended}): nothing was switched");
    }
    loop {
        let open = client.switchover(group, wish.clone())?;
        if open == 0 {
            return Ok(());
        }
        if Instant::now() >= until {
            bail!(
                "a guest still has its disks open {} after `{command}` ({open} connections): nothing was switched",
                human::duration(limit)
            );
        }
        sleep(LOOK_EVERY);
    }
}

fn words(group: &str, over: &SwitchState, stopped: Option<Duration>, pause: Duration) -> String {
    let SwitchState::Over { seqs, drained_ms, others_ms, gave_up_ms, problem, .. } = over else {
        return format!("group {group} was switched over before\n");
    };
    let seqs: Vec<_> = seqs.iter().map(|(writer, seq)| format!("{writer}={seq}")).collect();
    let mut text = format!(
        "group {group} is switched over: the backup has everything, up to {}\n",
        seqs.join(",")
    );
    if let Some(stopped) = stopped {
        text += &format!("  guests stopped   {} ms\n", stopped.as_millis());
    }
    text += &format!("  drained          {drained_ms} ms\n");
    if *others_ms > 0 {
        text += &format!("  other hosts      {others_ms} ms\n");
    }
    text += &format!("  lease given up   {gave_up_ms} ms\n");
    text += &format!(
        "  pause so far     {} ms; it ends when the guests run there\n",
        pause.as_millis()
    );
    if let Some(problem) = problem {
        text += &format!(
            "This host answers no client of the group any more, but the backup may not know it: {problem}. Then \
             `recover` waits out the grace.\n"
        );
    }
    text + &format!("Now, at the backup site: tidelock-backup recover {group}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_the_pause_and_what_comes_next_are_said() {
        let over = |problem: Option<&str>| SwitchState::Over {
            seqs: [("db".to_owned(), 7)].into(),
            drained_ms: 12,
            others_ms: 0,
            shut_ms: 20,
            gave_up_ms: 34,
            problem: problem.map(str::to_owned),
        };
        let pause = Duration::from_millis(3_046);
        let text = words("shop", &over(None), Some(Duration::from_secs(3)), pause);
        for part in ["up to db=7", "3000 ms", "12 ms", "34 ms", "3046 ms", "recover shop"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        let text = words("shop", &over(Some("it is away")), None, pause);
        assert!(text.contains("it is away") && !text.contains("guests stopped"), "{text}");
    }
}
