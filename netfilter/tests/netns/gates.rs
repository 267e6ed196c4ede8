//! The gates of a town, each in a process of its own.

use crate::drive::Drive;
use crate::town::{Plan, Town};
use std::collections::HashMap;

impl Town {
    /// The gate of every host, for both members, open.
    pub fn gates(&self, tagging: &str) -> Gates {
        self.gates_under(&[], tagging)
    }

    /// The same, each run by another command.
    pub fn gates_under(&self, wrapper: &[&str], tagging: &str) -> Gates {
        let members = format!(
            "members=web@{},{}/db@{},{}",
            self.ip("web"),
            self.ip6("web"),
            self.ip("db"),
            self.ip6("db")
        );
        let start = |ns: &str, member: &str, interface: &str, queue: &str| {
            let topology = if self.plan == Plan::OneBridge { "bridged" } else { "routed" };
            let mut drive = Drive::spawn_under(&self.ns(ns), wrapper);
            let pin = self.pin().display();
            let said = drive.tell(&format!(
                "start member={member} interface={interface} topology={topology} queue={queue} \
                 len=65536 mode=pipelined lease_ms=600000 backend=any {members} pin={pin} \
                 tagging={tagging}"
            ));
            drive.tell("commit 0 0");
            drive.tell("lease");
            (drive, said)
        };
        if self.plan == Plan::TwoHosts {
            let ((host, said), (other, _)) =
                (start("host", "web", "w0", "11"), start("other", "db", "d0", "12"));
            Gates { host, other: Some(other), said }
        } else {
            let (host, said) = start("host", "web,db", "w0,d0", "11,12");
            Gates { host, other: None, said }
        }
    }
}

/// The gates of the hosts.
pub struct Gates {
    pub host: Drive,
    pub other: Option<Drive>,
    /// What the first one said when it started.
    pub said: String,
}

impl Gates {
    pub fn of(&mut self, member: &str) -> &mut Drive {
        match (&mut self.other, member) {
            (Some(other), "db") => other,
            _ => &mut self.host,
        }
    }

    pub fn tell(&mut self, member: &str, command: &str) -> String {
        self.of(member).tell(&format!("on {member} {command}"))
    }

    /// To every gate.
    pub fn tell_all(&mut self, command: &str) {
        self.host.tell(command);
        if let Some(other) = &mut self.other {
            other.tell(command);
        }
    }

    /// From now on P is ahead of C, so packets get tags. What cannot get one leaves all the same: mode async holds nothing.
    pub fn let_writes_be_under_way(&mut self) {
        for member in ["web", "db"] {
            self.tell(member, "pending 0 5 700");
        }
        self.tell_all("mode async");
    }

    /// P and the programs' counters of a member.
    pub fn tags(&mut self, member: &str) -> HashMap<String, u64> {
        numbers(&self.tell(member, "tags"))
    }

    pub fn stats(&mut self, member: &str) -> HashMap<String, u64> {
        numbers(&self.tell(member, "stats"))
    }
}

pub fn numbers(said: &str) -> HashMap<String, u64> {
    let pairs = said.split_whitespace().filter_map(|pair| pair.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), value.parse().expect("a number"))).collect()
}
