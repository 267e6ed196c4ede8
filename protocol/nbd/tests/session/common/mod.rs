//! What the tests share: exports to serve, and what a client says, byte by byte. Written
//! without the crate's own encoders, so that a mistake there does not hide itself.

pub mod drive;
pub mod server;

use tidelock_nbd::{BlockSize, Event, Export, ExportTable, Features, ReplyEncoder, Session};

pub const FIXED: u32 = 1;
pub const NO_ZEROES: u32 = 2;

pub const EXPORT_NAME: u32 = 1;
pub const ABORT: u32 = 2;
pub const LIST: u32 = 3;
pub const STARTTLS: u32 = 5;
pub const INFO: u32 = 6;
pub const GO: u32 = 7;
pub const STRUCTURED_REPLY: u32 = 8;
pub const LIST_META: u32 = 9;
pub const SET_META: u32 = 10;

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const DISC: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const CACHE: u16 = 5;
pub const WRITE_ZEROES: u16 = 6;
pub const BLOCK_STATUS: u16 = 7;

pub const FUA: u16 = 1;
pub const NO_HOLE: u16 = 2;
pub const DF: u16 = 4;
pub const REQ_ONE: u16 = 8;
pub const FAST_ZERO: u16 = 16;

pub const ALL_FEATURES: Features = Features {
    flush: true,
    fua: true,
    trim: true,
    write_zeroes: true,
    fast_zero: true,
    cache: true,
    multi_conn: true,
};

pub const MIB: u64 = 1 << 20;

/// 1 MiB, byte-addressed, can do everything.
pub fn disk() -> Export {
    Export {
        name: "disk0".into(),
        description: "first".into(),
        size_bytes: MIB,
        read_only: false,
        block_size: BlockSize::default(),
        features: ALL_FEATURES,
        users: None,
    }
}

/// 64 KiB, read-only, in blocks of 512 bytes.
pub fn blocks() -> Export {
    Export {
        name: "ro".into(),
        description: String::new(),
        size_bytes: 64 << 10,
        read_only: true,
        block_size: BlockSize { min: 512, preferred: 4096, max: 32 << 10 },
        features: Features { flush: true, ..Features::default() },
        users: None,
    }
}

/// `disk0` and `ro`.
pub fn exports() -> ExportTable {
    ExportTable::new(vec![disk(), blocks()]).unwrap()
}

pub fn one(export: Export) -> ExportTable {
    ExportTable::new(vec![export]).unwrap()
}

pub fn client_flags(flags: u32) -> Vec<u8> {
    flags.to_be_bytes().to_vec()
}

pub fn option(option: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = b"IHAVEOPT".to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

pub fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u32).to_be_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

/// Data of INFO and GO.
pub fn info_data(name: &str, requests: &[u16]) -> Vec<u8> {
    let mut bytes = string(name);
    bytes.extend((requests.len() as u16).to_be_bytes());
    requests.iter().for_each(|request| bytes.extend(request.to_be_bytes()));
    bytes
}

/// Data of LIST_META_CONTEXT and SET_META_CONTEXT.
pub fn meta_data(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut bytes = string(name);
    bytes.extend((queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| bytes.extend(string(query)));
    bytes
}

pub fn request(flags: u16, command: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes
}

/// A session with the export open, and nothing left to send.
pub fn opened(exports: ExportTable, name: &str, structured: bool) -> (Session, ReplyEncoder) {
    let mut session = Session::new(exports);
    let mut input = client_flags(FIXED | NO_ZEROES);
    if structured {
        input.extend(option(STRUCTURED_REPLY, &[]));
        input.extend(option(SET_META, &meta_data(name, &["base:allocation"])));
    }
    input.extend(option(GO, &info_data(name, &[])));
    let step = session.next(&input).unwrap();
    assert_eq!(step.consumed, input.len());
    assert!(matches!(step.event, Some(Event::Opened { .. })));
    session.output().clear();
    let encoder = session.encoder().unwrap();
    (session, encoder)
}

/// Bytes from hexadecimal digits; blanks and line ends do not count.
pub fn hex(digits: &str) -> Vec<u8> {
    let digits: Vec<u8> = digits.bytes().filter(u8::is_ascii_hexdigit).collect();
    assert!(digits.len().is_multiple_of(2), "half a byte");
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}
