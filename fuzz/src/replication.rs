//! Conversations of PostgreSQL's replication, put together from short programs.

use tidelock_wal::Lsn;

/// Position at which the log of [`server`] begins.
pub const START: u64 = 0x10_0000;

const TEXTS: [&str; 16] = [
    "",
    "1",
    "2",
    "0",
    "7300000000000000001",
    "0/100000",
    "0/0",
    "FFFFFFFF/FFFFFFFF",
    "1MB",
    "150013",
    "physical",
    "00000002.history",
    "1\t0/100000\tx\n",
    "1\t0/100040\tx\n2\t0/100080\tx\n",
    "-1",
    "x",
];

const SQLSTATES: [&str; 8] =
    ["28P01", "55006", "42704", "55000", "58P01", "57P01", "53400", "XX000"];

const COMMANDS: [&str; 12] = [
    "IDENTIFY_SYSTEM",
    "SHOW wal_segment_size",
    "SHOW server_version_num",
    "TIMELINE_HISTORY 2",
    "READ_REPLICATION_SLOT far",
    "CREATE_REPLICATION_SLOT \"far\" TEMPORARY PHYSICAL (RESERVE_WAL)",
    "START_REPLICATION SLOT \"far\" 0/1000 TIMELINE 1",
    "START_REPLICATION 0/2000 TIMELINE 2",
    "START_REPLICATION PHYSICAL 0/0",
    "BASE_BACKUP (LABEL 'x')",
    "START_REPLICATION SLOT far LOGICAL 0/0",
    "",
];

/// The rest of a program. At its end everything is 0.
struct Program<'a>(&'a [u8]);

impl<'a> Program<'a> {
    fn next(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn u8(&mut self) -> u8 {
        self.next().unwrap_or(0)
    }

    /// A number of few bits, anywhere.
    fn u64(&mut self) -> u64 {
        u64::from(self.u8()) << (self.u8() % 64)
    }

    /// A length in one byte, and so many bytes.
    fn bytes(&mut self) -> &'a [u8] {
        let len = usize::from(self.u8()).min(self.0.len());
        let (bytes, rest) = self.0.split_at(len);
        self.0 = rest;
        bytes
    }

    /// A text of a table, or any.
    fn text(&mut self, table: &[&str]) -> Vec<u8> {
        match table.get(usize::from(self.u8())) {
            Some(text) => text.as_bytes().to_vec(),
            None => self.bytes().to_vec(),
        }
    }
}

fn message(out: &mut Vec<u8>, tag: u8, body: &[u8]) {
    out.push(tag);
    untagged(out, body);
}

fn untagged(out: &mut Vec<u8>, body: &[u8]) {
    out.extend((body.len() as u32 + 4).to_be_bytes());
    out.extend(body);
}

fn row(out: &mut Vec<u8>, values: &[Option<Vec<u8>>]) {
    let count = (values.len() as u16).to_be_bytes();
    message(out, b'T', &count);
    let mut body = count.to_vec();
    for value in values {
        let length = value.as_ref().map_or(-1, |value| value.len() as i32);
        body.extend(length.to_be_bytes());
        body.extend(value.as_deref().unwrap_or_default());
    }
    message(out, b'D', &body);
}

fn ended(out: &mut Vec<u8>) {
    message(out, b'C', b"X\0");
    message(out, b'Z', b"I");
}

/// Bytes of a server, by a program of steps: a byte, and the numbers that the step needs.
#[must_use]
pub fn server(program: &[u8]) -> Vec<u8> {
    let mut rest = Program(program);
    let (mut out, mut at) = (vec![], START);
    let answer = |out: &mut Vec<u8>, texts: &[&str]| {
        let values: Vec<_> = texts.iter().map(|text| Some(text.as_bytes().to_vec())).collect();
        row(out, &values);
        ended(out);
    };
    while let Some(step) = rest.next() {
        match step % 16 {
            0 => {
                message(&mut out, b'R', &[0; 4]);
                message(&mut out, b'Z', b"I");
                let timeline = TEXTS[usize::from(rest.u8() % 4)];
                answer(&mut out, &[TEXTS[4], timeline, TEXTS[7]]);
                answer(&mut out, &["1MB"]);
                answer(&mut out, &["150013"]);
            }
            1 => {
                let number = u32::from(rest.u8()).to_be_bytes();
                message(&mut out, b'R', &[&number[..], rest.bytes()].concat());
            }
            2 => message(&mut out, b'Z', b"I"),
            3 => message(&mut out, b'C', b"X\0"),
            kind @ (4 | 5) => {
                let count = rest.u8() % 6;
                let value = |_| Some(rest.text(&TEXTS)).filter(|text| !text.is_empty());
                let values: Vec<_> = (0..count).map(value).collect();
                row(&mut out, &values);
                if kind == 5 {
                    ended(&mut out);
                }
            }
            6 => {
                let code = SQLSTATES[usize::from(rest.u8() % 8)];
                let fields = [b"C", code.as_bytes(), b"\0M", rest.bytes(), b"\0\0"].concat();
                message(&mut out, b'E', &fields);
            }
            7 => message(&mut out, b'W', &[0, 0, 0]),
            8 => {
                let bytes = vec![step; usize::from(rest.u8())];
                let wrong = rest.u8();
                // Mostly where it should be.
                let from = if wrong < 250 { at } else { at.wrapping_add(rest.u64()) };
                let head = [from.to_be_bytes(), rest.u64().to_be_bytes(), [0; 8]].concat();
                message(&mut out, b'd', &[b"w", &head[..], &bytes].concat());
                at += bytes.len() as u64;
            }
            9 => message(&mut out, b'd', &[b"k", &[0; 16][..], &[rest.u8()]].concat()),
            10 => message(&mut out, b'c', &[]),
            11 => {
                // The end of a timeline, and what the server says of itself behind it.
                message(&mut out, b'c', &[]);
                let next = TEXTS[usize::from(rest.u8() % 4)];
                let text = Lsn(at).to_string();
                row(&mut out, &[Some(next.into()), Some(text.into_bytes())]);
                message(&mut out, b'C', b"X\0");
                ended(&mut out);
                answer(&mut out, &[TEXTS[4], next, TEXTS[7]]);
            }
            12 => answer(&mut out, &["00000002.history", TEXTS[12]]),
            13 => message(&mut out, b'S', &[rest.bytes(), b"\0v\0"].concat()),
            14 => {
                let tag = rest.u8();
                message(&mut out, tag, rest.bytes());
            }
            _ => out.extend(rest.bytes()),
        }
    }
    out
}

/// Bytes of a client, by a program of steps: a byte, and the numbers that the step needs.
#[must_use]
pub fn client(program: &[u8]) -> Vec<u8> {
    let mut rest = Program(program);
    let mut out = vec![];
    while let Some(step) = rest.next() {
        match step % 11 {
            0 => untagged(&mut out, b"\0\x03\0\0user\0far\0replication\0true\0\0"),
            1 => {
                let version = (3_u32 << 16 | u32::from(rest.u8())).to_be_bytes();
                untagged(&mut out, &[&version[..], rest.bytes(), b"\0"].concat());
            }
            2 => untagged(&mut out, &(80_877_102 + u32::from(rest.u8() % 4)).to_be_bytes()),
            3 => {
                let text = rest.text(&COMMANDS);
                message(&mut out, b'Q', &[&text[..], b"\0"].concat());
            }
            4 => message(&mut out, b'p', b"secret\0"),
            5 => {
                let first = [b"n,,n=,r=", rest.bytes()].concat();
                let length = (first.len() as u32).to_be_bytes();
                message(&mut out, b'p', &[b"SCRAM-SHA-256\0", &length[..], &first].concat());
            }
            6 => {
                let positions =
                    [rest.u64(), rest.u64(), rest.u64(), 0].map(u64::to_be_bytes).concat();
                message(&mut out, b'd', &[b"r", &positions[..], &[rest.u8() % 2]].concat());
            }
            7 => message(&mut out, b'c', &[]),
            8 => message(&mut out, b'd', &[b"h", &[0; 24][..]].concat()),
            9 => {
                let tag = rest.u8();
                message(&mut out, tag, rest.bytes());
            }
            _ => out.extend(rest.bytes()),
        }
    }
    out
}
