//! A gate in a process of its own, so that it can be killed.

use crate::lab::{INTERFACE, Lab, PATIENCE, in_namespace};
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use tidelock_netfilter::rules::Topology;

/// A running `gate-drive`.
pub struct Drive {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Drive {
    /// Starts a gate in the host's namespace.
    pub fn start(lab: &Lab, backend: &str, queue: u16, len: u32, lease_ms: u64) -> Drive {
        let topology = match lab.topology() {
            Topology::Routed => "routed",
            Topology::Bridged => "bridged",
        };
        let mut drive = Drive::spawn(&lab.host());
        let said = drive.tell(&format!(
            "start member=web interface={INTERFACE} topology={topology} queue={queue} len={len} \
             mode=pipelined lease_ms={lease_ms} backend={backend}"
        ));
        assert!(said.contains("backend="), "{said}");
        drive
    }

    /// Starts `gate-drive`, which waits for its first command.
    pub fn spawn(namespace: &str) -> Drive {
        Drive::spawn_under(namespace, &[])
    }

    /// The same, run by another command.
    pub fn spawn_under(namespace: &str, wrapper: &[&str]) -> Drive {
        let words = [wrapper, &[env!("CARGO_BIN_EXE_gate-drive")]].concat();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process =
            in_namespace(namespace, move || command.spawn()).expect("gate-drive starts");
        let input = process.stdin.take().expect("piped");
        let output = BufReader::new(process.stdout.take().expect("piped"));
        Drive { process, input, output }
    }

    /// One command and what is answered to it.
    pub fn tell(&mut self, command: &str) -> String {
        writeln!(self.input, "{command}").expect("gate-drive lives");
        let mut answer = String::new();
        self.output.read_line(&mut answer).expect("gate-drive answers");
        let ok = answer.strip_prefix("ok").unwrap_or_else(|| panic!("{command}: {answer}"));
        ok.trim().to_owned()
    }

    /// As [`tell`](Self::tell), for what must be refused.
    pub fn tell_refused(&mut self, command: &str) -> String {
        writeln!(self.input, "{command}").expect("gate-drive lives");
        let mut answer = String::new();
        self.output.read_line(&mut answer).expect("gate-drive answers");
        let error = answer.strip_prefix("error").unwrap_or_else(|| panic!("{command}: {answer}"));
        error.trim().to_owned()
    }

    pub fn stats(&mut self) -> HashMap<String, u64> {
        let said = self.tell("stats");
        let pairs = said.split_whitespace().filter_map(|pair| pair.split_once('='));
        pairs.map(|(name, value)| (name.to_owned(), value.parse().expect("a number"))).collect()
    }

    pub fn stat(&mut self, name: &str) -> u64 {
        self.stats()[name]
    }

    /// Waits until a counter has a value.
    pub fn until_stat(&mut self, name: &str, wanted: impl Fn(u64) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !wanted(self.stat(name)) {
            assert!(Instant::now() < end, "{name} does not get there: {:?}", self.stats());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// kill -9.
    pub fn kill(mut self) {
        self.end();
    }

    fn end(&mut self) {
        // Both fail only if the process has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Drive {
    fn drop(&mut self) {
        self.end();
    }
}
