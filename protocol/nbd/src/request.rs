//! Requests: what reaches the caller, and the one check that lets them through.

use crate::errno::Errno;
use crate::export::Export;
use crate::limits;
use crate::wire::{RequestHeader, cmd, cmd_flag};

/// The client's name for a request, returned in its reply. Not necessarily unique: a client
/// may misuse it, so do not use it as a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cookie(pub u64);

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Command {
    /// Send `len` bytes from `offset`.
    Read,
    /// Write `len` bytes, which follow the header in the stream.
    Write,
    /// Make everything that was answered before durable.
    Flush,
    /// The range is no longer needed.
    Trim,
    /// Fill the range with zeroes.
    WriteZeroes,
    /// Describe the range.
    BlockStatus,
    /// The range will be read soon.
    Cache,
}

impl Command {
    /// Whether it changes the disk.
    pub const fn is_write(self) -> bool {
        matches!(self, Self::Write | Self::Trim | Self::WriteZeroes)
    }
}

/// Flags of a request. Only flags that mean something for its command are ever set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RequestFlags(u8);

impl RequestFlags {
    /// No flag.
    pub const NONE: Self = Self(0);
    /// See [`RequestFlags::fua`].
    pub const FUA: Self = Self(cmd_flag::FUA as u8);
    /// See [`RequestFlags::no_hole`].
    pub const NO_HOLE: Self = Self(cmd_flag::NO_HOLE as u8);
    /// See [`RequestFlags::df`].
    pub const DF: Self = Self(cmd_flag::DF as u8);
    /// See [`RequestFlags::req_one`].
    pub const REQ_ONE: Self = Self(cmd_flag::REQ_ONE as u8);
    /// See [`RequestFlags::fast_zero`].
    pub const FAST_ZERO: Self = Self(cmd_flag::FAST_ZERO as u8);

    /// Both sets together.
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    const fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// WRITE, WRITE_ZEROES, TRIM: answer when the effect is on stable storage.
    pub const fn fua(self) -> bool {
        self.has(Self::FUA)
    }

    /// WRITE_ZEROES: leave the range allocated.
    pub const fn no_hole(self) -> bool {
        self.has(Self::NO_HOLE)
    }

    /// READ: answer in one content chunk.
    pub const fn df(self) -> bool {
        self.has(Self::DF)
    }

    /// BLOCK_STATUS: one extent is enough.
    pub const fn req_one(self) -> bool {
        self.has(Self::REQ_ONE)
    }

    /// WRITE_ZEROES: fail with [`Errno::NotSup`] unless it is quicker than writing zeroes.
    pub const fn fast_zero(self) -> bool {
        self.has(Self::FAST_ZERO)
    }
}

/// A request that passed all checks.
///
/// `offset + len` is inside the export, and both are multiples of its minimum block size.
/// `len` is 0 for FLUSH only. It is at most the export's maximum block size for READ and
/// WRITE; the others carry no payload and may cover up to 4 GiB - 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// To be returned in the reply.
    pub cookie: Cookie,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u32,
    /// What to do.
    pub command: Command,
    /// How to do it.
    pub flags: RequestFlags,
}

const _: () = assert!(size_of::<Request>() == 24);

impl Request {
    /// The byte after the last.
    pub const fn end(&self) -> u64 {
        // Cannot overflow: the range was checked against the export's size.
        self.offset + self.len as u64
    }
}

/// What the checks need to know, in one cache line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    size_bytes: u64,
    min_block_mask: u32,
    max_payload: u32,
    read_only: bool,
    flush: bool,
    trim: bool,
    write_zeroes: bool,
    cache: bool,
    block_status: bool,
    shutting_down: bool,
    /// Command flags that were offered.
    offered_flags: u16,
}

/// What to do with a request header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Hand it to the caller.
    Pass(Request),
    /// Nothing to be done: answer success.
    Empty(Request),
    /// Answer with an error.
    Refuse(Errno, &'static str),
}

impl Rules {
    pub(crate) fn new(export: &Export, structured: bool, block_status: bool) -> Self {
        let features = export.features;
        let offered_flags = [
            (features.fua, cmd_flag::FUA),
            (features.write_zeroes, cmd_flag::NO_HOLE),
            (features.write_zeroes && features.fast_zero, cmd_flag::FAST_ZERO),
            (structured, cmd_flag::DF),
            (structured, cmd_flag::REQ_ONE),
        ];
        Self {
            size_bytes: export.size_bytes,
            min_block_mask: export.block_size.min - 1,
            max_payload: export.block_size.max.min(limits::MAX_PAYLOAD_BYTES),
            read_only: export.read_only,
            flush: features.flush,
            trim: features.trim,
            write_zeroes: features.write_zeroes,
            cache: features.cache,
            block_status,
            shutting_down: false,
            offered_flags: offered_flags.iter().map(|&(on, bit)| u16::from(on) * bit).sum(),
        }
    }

    pub(crate) fn begin_shutdown(&mut self) {
        self.shutting_down = true;
    }

    /// Check a request that is not DISC. The order of the checks decides which error a
    /// request with several faults gets: the one that the client can least do without first.
    pub(crate) fn check(&self, header: &RequestHeader) -> Verdict {
        use Verdict::Refuse;
        // Flags beside FUA, which is valid with all commands if it is offered.
        let (command, own_flags, supported) = match header.command.get() {
            cmd::READ => (Command::Read, cmd_flag::DF, true),
            cmd::WRITE => (Command::Write, 0, true),
            cmd::FLUSH => (Command::Flush, 0, self.flush),
            cmd::TRIM => (Command::Trim, 0, self.trim),
            cmd::CACHE => (Command::Cache, 0, self.cache),
            cmd::WRITE_ZEROES => {
                let own = cmd_flag::NO_HOLE | cmd_flag::FAST_ZERO;
                (Command::WriteZeroes, own, self.write_zeroes)
            }
            cmd::BLOCK_STATUS => (Command::BlockStatus, cmd_flag::REQ_ONE, self.block_status),
            _ => return Refuse(Errno::Inval, "unknown command"),
        };
        if self.shutting_down {
            return Refuse(Errno::Shutdown, "the server is shutting down");
        }
        if self.read_only && command.is_write() {
            return Refuse(Errno::Perm, "the export is read-only");
        }
        if !supported {
            let why = match command {
                Command::BlockStatus => "no metadata context was selected for this export",
                _ => "the export does not offer this command",
            };
            return Refuse(Errno::Inval, why);
        }
        let flags = header.flags.get();
        if flags & !((own_flags | cmd_flag::FUA) & self.offered_flags) != 0 {
            return Refuse(Errno::Inval, "a command flag is unknown or was not offered");
        }
        let (offset, len) = (header.offset.get(), header.len.get());
        if command == Command::Flush {
            if offset != 0 || len != 0 {
                return Refuse(Errno::Inval, "offset and length of a flush must be 0");
            }
        } else {
            if (offset | u64::from(len)) & u64::from(self.min_block_mask) != 0 {
                return Refuse(Errno::Inval, "not aligned to the minimum block size");
            }
            if matches!(command, Command::Read | Command::Write) && len > self.max_payload {
                return Refuse(Errno::Inval, "longer than the maximum block size");
            }
            let inside = offset.checked_add(len.into()).is_some_and(|end| end <= self.size_bytes);
            if !inside {
                let errno = match command {
                    Command::Write | Command::WriteZeroes => Errno::NoSpc,
                    _ => Errno::Inval,
                };
                return Refuse(errno, "beyond the end of the export");
            }
            if len == 0 && command == Command::BlockStatus {
                // Its reply would need an extent, and an extent is not empty.
                return Refuse(Errno::Inval, "block status of an empty range");
            }
        }
        // FUA on a command that writes nothing is allowed and means nothing.
        let kept = if command.is_write() { flags } else { flags & !cmd_flag::FUA };
        let request = Request {
            cookie: Cookie(header.cookie.get()),
            offset,
            len,
            command,
            flags: RequestFlags(kept as u8),
        };
        if len == 0 && command != Command::Flush {
            Verdict::Empty(request)
        } else {
            Verdict::Pass(request)
        }
    }
}
