//! What is offered to clients.

use std::sync::Arc;

use crate::error::ExportError;
use crate::limits;
use crate::users::Users;
use crate::wire::transmission;

/// Block size constraints, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSize {
    /// Offsets and lengths must be multiples of this: 1, or a power of two up to 64 KiB.
    pub min: u32,
    /// Quick from this size on: a power of two, at least 512 and `min`.
    pub preferred: u32,
    /// Longest READ and WRITE, a multiple of `min`, at most [`limits::MAX_PAYLOAD_BYTES`].
    pub max: u32,
}

impl Default for BlockSize {
    fn default() -> Self {
        Self { min: 1, preferred: 4096, max: limits::MAX_PAYLOAD_BYTES }
    }
}

/// What an export can do beyond READ and WRITE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// FLUSH.
    pub flush: bool,
    /// The FUA flag.
    pub fua: bool,
    /// TRIM. Not offered on a read-only export.
    pub trim: bool,
    /// WRITE_ZEROES, with the NO_HOLE flag. Not offered on a read-only export.
    pub write_zeroes: bool,
    /// The FAST_ZERO flag; needs `write_zeroes`. The caller decides for each request whether
    /// it is fast, and answers [`Errno::NotSup`](crate::Errno::NotSup) if not.
    pub fast_zero: bool,
    /// CACHE.
    pub cache: bool,
    /// A flush on one connection covers writes that were completed on all others.
    pub multi_conn: bool,
}

/// One disk as clients see it.
#[derive(Clone, Debug)]
pub struct Export {
    /// What clients ask for.
    pub name: String,
    /// For humans, may be empty.
    pub description: String,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Refuse writes.
    pub read_only: bool,
    /// Constraints on requests.
    pub block_size: BlockSize,
    /// What it can do.
    pub features: Features,
    /// How many clients may have it open at once, over all sessions; `None`: any number.
    pub users: Option<Arc<Users>>,
}

impl Export {
    fn check(&self) -> Result<(), ExportError> {
        let name = || self.name.clone();
        for (field, text) in [("name", &self.name), ("description", &self.description)] {
            if text.len() > limits::MAX_STRING_BYTES || text.contains('\0') {
                // The text itself may be huge: show its beginning only.
                let name = self.name.chars().take(64).collect();
                return Err(ExportError::BadString { name, field });
            }
        }
        let BlockSize { min, preferred, max } = self.block_size;
        let rule = if !min.is_power_of_two() || min > limits::MAX_MIN_BLOCK_BYTES {
            Some("block size min must be a power of two, 1 to 65536")
        } else if !preferred.is_power_of_two()
            || preferred < min.max(limits::MIN_PREFERRED_BLOCK_BYTES)
        {
            Some("block size preferred must be a power of two, at least 512 and min")
        } else if max > limits::MAX_PAYLOAD_BYTES || !max.is_multiple_of(min) {
            Some("block size max must be a multiple of min, at most 33554432")
        } else if u64::from(max) < u64::from(preferred).min(self.size_bytes) {
            Some("block size max must be at least preferred, or the export's size if that is less")
        } else if max == 0 {
            Some("block size max must not be 0")
        } else {
            None
        };
        if let Some(rule) = rule {
            return Err(ExportError::BadBlockSize { name: name(), rule });
        }
        if self.size_bytes > limits::MAX_EXPORT_BYTES || !self.size_bytes.is_multiple_of(min.into())
        {
            return Err(ExportError::BadSize { name: name(), size_bytes: self.size_bytes });
        }
        if self.features.fast_zero && !self.features.write_zeroes {
            return Err(ExportError::FastZeroAlone { name: name() });
        }
        Ok(())
    }

    /// The flags sent to a client.
    pub(crate) fn transmission_flags(&self, structured: bool) -> u16 {
        let Features { flush, fua, trim, write_zeroes, fast_zero, cache, multi_conn } =
            self.features;
        let writable = !self.read_only;
        [
            (true, transmission::HAS_FLAGS),
            (self.read_only, transmission::READ_ONLY),
            (flush, transmission::SEND_FLUSH),
            (fua, transmission::SEND_FUA),
            (trim && writable, transmission::SEND_TRIM),
            (write_zeroes && writable, transmission::SEND_WRITE_ZEROES),
            (structured, transmission::SEND_DF),
            (multi_conn, transmission::CAN_MULTI_CONN),
            (cache, transmission::SEND_CACHE),
            (fast_zero && writable, transmission::SEND_FAST_ZERO),
        ]
        .into_iter()
        .filter_map(|(on, bit)| on.then_some(bit))
        .sum()
    }
}

/// The exports of a server, checked once and shared by all its sessions.
#[derive(Clone, Debug)]
pub struct ExportTable(Arc<[Export]>);

impl ExportTable {
    /// Check and keep the exports. Their order gives the index in
    /// [`Event::Opened`](crate::Event::Opened).
    pub fn new(exports: Vec<Export>) -> Result<Self, ExportError> {
        if exports.len() > limits::MAX_EXPORTS {
            return Err(ExportError::TooMany { count: exports.len() });
        }
        for (index, export) in exports.iter().enumerate() {
            export.check()?;
            if exports[..index].iter().any(|other| other.name == export.name) {
                return Err(ExportError::DuplicateName { name: export.name.clone() });
            }
        }
        Ok(Self(exports.into()))
    }

    /// All exports, in order.
    pub fn as_slice(&self) -> &[Export] {
        &self.0
    }

    /// The export that a client means. The empty name means the only export, if there is
    /// just one: with several, a guess could hand out the wrong disk.
    pub(crate) fn find(&self, name: &[u8]) -> Option<usize> {
        let exact = self.0.iter().position(|export| export.name.as_bytes() == name);
        exact.or_else(|| (name.is_empty() && self.0.len() == 1).then_some(0))
    }
}
