//! Messages by hand, and time.
#![allow(dead_code)]

use std::time::Duration;
use tidelock_pgstream::{Event, Login, Now, PasswordMethod, Position, Receiver, Timing};
use tidelock_wal::{Lsn, PgTimestamp, TimelineId};

pub const SYSTEM: u64 = 7_300_000_000_000_000_001;
pub const SEGMENT: u64 = 1 << 20;

pub fn now(seconds: u64) -> Now {
    Now { mono: Duration::from_secs(seconds), wall: PgTimestamp(1_000_000 * seconds as i64) }
}

pub fn at(timeline: u32, at: u64) -> Position {
    Position { timeline: TimelineId(timeline), at: Lsn(at) }
}

pub fn login(password: Option<&str>) -> Login {
    Login {
        user: "postgres".into(),
        password: password.map(Into::into),
        application_name: "tidelock".into(),
        weakest: PasswordMethod::Cleartext,
    }
}

pub fn receiver(password: Option<&str>) -> Receiver {
    Receiver::new(login(password), None, Timing::default(), now(0)).unwrap()
}

pub fn message(tag: u8, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len() + 4).unwrap();
    [&[tag], &length.to_be_bytes()[..], body].concat()
}

pub fn authentication(number: u32, data: &[u8]) -> Vec<u8> {
    message(b'R', &[&number.to_be_bytes()[..], data].concat())
}

pub fn ready() -> Vec<u8> {
    message(b'Z', b"I")
}

pub fn complete() -> Vec<u8> {
    message(b'C', b"X\0")
}

/// Row description and row, without the end of the answer.
pub fn row(values: &[Option<&str>]) -> Vec<u8> {
    let count = u16::try_from(values.len()).unwrap().to_be_bytes();
    let column = |_: &Option<&str>| [&b"c\0"[..], &[0; 18]].concat();
    let columns: Vec<u8> = values.iter().flat_map(column).collect();
    let value = |value: &Option<&str>| match value {
        None => (-1_i32).to_be_bytes().to_vec(),
        Some(text) => [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat(),
    };
    let values: Vec<u8> = values.iter().flat_map(value).collect();
    [
        message(b'T', &[&count[..], &columns].concat()),
        message(b'D', &[&count[..], &values].concat()),
    ]
    .concat()
}

pub fn answer(values: &[Option<&str>]) -> Vec<u8> {
    [row(values), complete(), ready()].concat()
}

pub fn error(sqlstate: &str, text: &str) -> Vec<u8> {
    message(b'E', format!("SERROR\0C{sqlstate}\0M{text}\0Dmore\0\0").as_bytes())
}

pub fn identity(timeline: u32, end: &str) -> Vec<u8> {
    answer(&[Some(&SYSTEM.to_string()), Some(&timeline.to_string()), Some(end), None])
}

/// Everything up to [`Event::Identified`].
pub fn greeting(timeline: u32, end: &str) -> Vec<u8> {
    [
        authentication(0, &[]),
        message(b'S', b"server_version\x0015.13\0"),
        message(b'K', &[0; 8]),
        message(b'N', b"SNOTICE\0C00000\0Mhello\0\0"),
        ready(),
        identity(timeline, end),
        answer(&[Some("1MB")]),
        answer(&[Some("150013")]),
    ]
    .concat()
}

pub fn copy_both() -> Vec<u8> {
    message(b'W', &[0, 0, 0])
}

pub fn wal(start: u64, bytes: &[u8]) -> Vec<u8> {
    let head = [start.to_be_bytes(), (start + 100).to_be_bytes(), [0; 8]].concat();
    message(b'd', &[b"w", &head[..], bytes].concat())
}

pub fn keepalive(reply: u8) -> Vec<u8> {
    message(b'd', &[b"k", &[0; 16][..], &[reply]].concat())
}

/// Gives bytes, and returns the events that they make.
pub fn feed(receiver: &mut Receiver, bytes: &[u8]) -> Vec<Event> {
    receiver.received(bytes);
    std::iter::from_fn(|| receiver.poll()).collect()
}

/// The text of the command that is last in the output.
pub fn sent(receiver: &mut Receiver) -> String {
    let output = receiver.output().split();
    let begin = output.iter().rposition(|&byte| byte == b'Q').unwrap_or(0);
    String::from_utf8_lossy(&output[(begin + 5).min(output.len())..]).trim_end_matches('\0').into()
}
