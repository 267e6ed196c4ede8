//! An NBD client, as small as it can be: one connection to a Unix socket, one request at a time, from a thread that may
//! wait. It is for images that `qemu-nbd` serves, so that any format is written and read by QEMU's own code.
//!
//! Source: the NBD protocol document (`doc/proto.md` of the NetworkBlockDevice project), fixed newstyle negotiation
//! with `NBD_OPT_GO`, simple replies.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const FIXED_NEWSTYLE: u16 = 1;
const NO_ZEROES: u16 = 2;
const OPT_GO: u32 = 7;
const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const INFO_EXPORT: u16 = 0;
/// The most bytes of an answer to an option.
const OPTION_REPLY_MAX: u32 = 64 << 10;
/// The most bytes of one request.
const REQUEST_MAX: u64 = 4 << 20;
/// A request that takes longer never ends: the server or its disk hangs.
const PATIENCE: Duration = Duration::from_secs(120);

const READ: u16 = 0;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
const FLUSH: u16 = 3;
const WRITE_ZEROES: u16 = 6;

/// A disk behind a socket.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    size_bytes: u64,
    cookie: u64,
}

impl Client {
    /// Connects to an export.
    pub fn connect(socket: &Path, export: &str) -> io::Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        if u64_of(&mut stream)? != MAGIC || u64_of(&mut stream)? != OPTION_MAGIC {
            return Err(wrong("this is not an NBD server"));
        }
        if u16_of(&mut stream)? & FIXED_NEWSTYLE == 0 {
            return Err(wrong("this NBD server is too old"));
        }
        let mut hello = Vec::new();
        hello.extend(u32::from(FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
        hello.extend(OPTION_MAGIC.to_be_bytes());
        hello.extend(OPT_GO.to_be_bytes());
        hello.extend((4 + export.len() as u32 + 2).to_be_bytes());
        hello.extend((export.len() as u32).to_be_bytes());
        hello.extend(export.as_bytes());
        hello.extend(0_u16.to_be_bytes());
        stream.write_all(&hello)?;
        let mut size_bytes = None;
        loop {
            let magic = u64_of(&mut stream)?;
            let (option, kind, len) =
                (u32_of(&mut stream)?, u32_of(&mut stream)?, u32_of(&mut stream)?);
            if magic != OPTION_REPLY_MAGIC || option != OPT_GO || len > OPTION_REPLY_MAX {
                return Err(wrong("an answer that is none"));
            }
            let mut data = vec![0; len as usize];
            stream.read_exact(&mut data)?;
            match (kind, size_bytes) {
                (REP_INFO, _) if data.len() >= 12 && data[..2] == INFO_EXPORT.to_be_bytes() => {
                    size_bytes = data[2..10].try_into().ok().map(u64::from_be_bytes);
                }
                (REP_INFO, _) => {}
                (REP_ACK, Some(size_bytes)) => {
                    return Ok(Self { stream, size_bytes, cookie: 0 });
                }
                _ => {
                    let why = String::from_utf8_lossy(&data);
                    return Err(wrong(&format!("no export {export:?}: {why}")));
                }
            }
        }
    }

    /// The disk's size.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Fills the buffer from this offset on.
    pub fn read(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let mut at = offset;
        for part in buf.chunks_mut(REQUEST_MAX as usize) {
            self.ask(READ, at, part.len() as u64, &[])?;
            self.stream.read_exact(part)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Writes the data there.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut at = offset;
        for part in data.chunks(REQUEST_MAX as usize) {
            self.ask(WRITE, at, part.len() as u64, part)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    /// The range reads as zeroes.
    pub fn zero(&mut self, offset: u64, len_bytes: u64) -> io::Result<()> {
        let (mut at, end) = (offset, offset + len_bytes);
        while at < end {
            let len = (end - at).min(1 << 30);
            self.ask(WRITE_ZEROES, at, len, &[])?;
            at += len;
        }
        Ok(())
    }

    /// Makes everything written durable.
    pub fn flush(&mut self) -> io::Result<()> {
        self.ask(FLUSH, 0, 0, &[])
    }

    fn ask(&mut self, command: u16, offset: u64, len: u64, data: &[u8]) -> io::Result<()> {
        self.cookie += 1;
        self.stream.write_all(&request(command, self.cookie, offset, len as u32))?;
        self.stream.write_all(data)?;
        let (magic, error, cookie) =
            (u32_of(&mut self.stream)?, u32_of(&mut self.stream)?, u64_of(&mut self.stream)?);
        if magic != REPLY_MAGIC || cookie != self.cookie {
            return Err(wrong("an answer to something else"));
        }
        match error {
            0 => Ok(()),
            // They are Linux's numbers.
            error => Err(io::Error::from_raw_os_error(error as i32)),
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // The server sees the end of the connection as well.
        let _ = self.stream.write_all(&request(DISCONNECT, 0, 0, 0));
    }
}

fn request(command: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut request = Vec::with_capacity(28);
    request.extend(REQUEST_MAGIC.to_be_bytes());
    request.extend(0_u16.to_be_bytes());
    request.extend(command.to_be_bytes());
    request.extend(cookie.to_be_bytes());
    request.extend(offset.to_be_bytes());
    request.extend(len.to_be_bytes());
    request
}

fn wrong(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn u16_of(stream: &mut UnixStream) -> io::Result<u16> {
    let mut bytes = [0; 2];
    stream.read_exact(&mut bytes)?;
    Ok(u16::from_be_bytes(bytes))
}

fn u32_of(stream: &mut UnixStream) -> io::Result<u32> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes)?;
    Ok(u32::from_be_bytes(bytes))
}

fn u64_of(stream: &mut UnixStream) -> io::Result<u64> {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes)?;
    Ok(u64::from_be_bytes(bytes))
}
