//! What happened: the last lines for people, and a hash of all of them.
//!
//! Two runs of a seed have the same hash, or something that is not simulated has had a say.

use std::collections::VecDeque;
use std::fmt::{self, Write};

/// Lines that are kept for a report.
const TAIL_LINES: usize = 160;

/// A running trace.
#[derive(Debug)]
pub struct Trace {
    tail: VecDeque<String>,
    hash: u64,
    /// Each line is printed as it comes.
    live: bool,
}

impl Trace {
    /// An empty trace. `live`: each line is printed as it comes.
    #[must_use]
    pub fn new(live: bool) -> Self {
        Self { tail: VecDeque::new(), hash: 0xcbf2_9ce4_8422_2325, live }
    }

    /// Adds a line.
    pub fn line(&mut self, now_ns: u64, what: fmt::Arguments<'_>) {
        let mut line = if self.tail.len() < TAIL_LINES {
            String::with_capacity(96)
        } else {
            self.tail.pop_front().expect("not empty")
        };
        line.clear();
        let (ms, us) = (now_ns / 1_000_000, now_ns / 1000 % 1000);
        // Writing to a string does not fail.
        let _ = write!(line, "{ms:>7}.{us:03} ms  {what}");
        for byte in line.bytes() {
            self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        if self.live {
            println!("{line}");
        }
        self.tail.push_back(line);
    }

    /// The hash of everything so far.
    #[must_use]
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// The lines that were kept.
    #[must_use]
    pub fn into_tail(self) -> Vec<String> {
        self.tail.into()
    }
}
