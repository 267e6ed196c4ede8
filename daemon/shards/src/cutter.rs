//! The cutter: a log that arrives in pieces of any length becomes pieces that are entries.
//!
//! - A piece ends where a transaction ends (commit, abort, prepare), so that at most one transaction ends in it, and
//!   the piece's stamp is that one's. Two commits in one entry would be applied together, the first one too late for
//!   a commit of another shard that depends on it.
//! - A piece ends with the last whole record that has arrived: nothing waits for what comes later.
//! - A piece is never longer than the bound, so a bulk load and long records are cut anywhere. Such pieces have no
//!   stamp: no transaction ends in them.
//!
//! The reader verifies checksums of whole records. Bytes of a long record leave before its checksum is verified; they
//! are not the end of a transaction, and a fault stops everything from that record's end on.

use crate::backlog::{Piece, Stamp};
use bytes::{Bytes, BytesMut};
use tidelock_shard::LogIndex;
use tidelock_wal::{Kind, Lsn, PgTimestamp, TimelineHistory, WalError, WalReader, Xid};

/// Prefix of the messages that are NOPs. Clients must not use it.
pub(crate) const NOP_PREFIX: &str = "tidelock";

/// The end of a transaction, or what may be one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The end of a transaction, with its stamp.
    At(PgTimestamp),
    /// The rest of a record whose begin was not read.
    Unread,
}

#[derive(Debug)]
pub(crate) struct Cutter {
    reader: WalReader,
    /// Bytes that are in no piece yet, and where they begin.
    tail: BytesMut,
    tail_begin: Lsn,
    piece_max: usize,
    /// The transaction that has put a NOP's message into the log.
    nop: Option<Xid>,
}

impl Cutter {
    /// A cutter of the log from a position on. Pieces begin at `keep_from`, behind it.
    pub fn new(reader: WalReader, keep_from: Lsn, piece_max: usize) -> Self {
        let tail_begin = keep_from.max(reader.position());
        Self { reader, tail: BytesMut::new(), tail_begin, piece_max: piece_max.max(1), nop: None }
    }

    /// Position of the next byte.
    pub fn position(&self) -> Lsn {
        self.reader.position()
    }

    pub fn follow(&mut self, history: TimelineHistory) {
        self.reader.follow(history);
    }

    /// Takes the next bytes, and hands out pieces. `stamp` says what the end of a transaction at a position is
    /// stamped with.
    ///
    /// # Errors
    /// The log is damaged, or is not the one that was asked for. What was handed out is good.
    pub fn push(
        &mut self,
        bytes: &[u8],
        mut stamp: impl FnMut(Lsn, Ended) -> Stamp,
        pieces: &mut Vec<Piece>,
    ) -> Result<(), WalError> {
        let begin = self.reader.position();
        let known = usize::try_from(self.tail_begin.0.saturating_sub(begin.0));
        self.tail.extend_from_slice(bytes.get(known.unwrap_or(usize::MAX)..).unwrap_or_default());
        self.reader.push(bytes);
        let mut whole = None;
        while let Some(item) = self.reader.next() {
            let item = item?;
            if item.end <= self.tail_begin {
                continue;
            }
            whole = Some(item.end);
            match &item.kind {
                Kind::Message { is_transactional: true, prefix }
                    if **prefix == *NOP_PREFIX.as_bytes() =>
                {
                    self.nop = Some(item.xid);
                }
                Kind::Transaction(transaction) => {
                    let nop = self.nop.take_if(|xid| *xid == item.xid).is_some();
                    let of = stamp(item.end, Ended::At(transaction.stamp));
                    self.cut(item.end, of, nop, pieces);
                }
                Kind::Rest => self.cut(item.end, stamp(item.end, Ended::Unread), false, pieces),
                _ => {}
            }
        }
        if let Some(end) = whole.filter(|end| *end > self.tail_begin) {
            self.cut(end, Stamp::Part, false, pieces);
        }
        while self.tail.len() >= self.piece_max {
            self.part(self.piece_max, Stamp::Part, false, pieces);
        }
        Ok(())
    }

    /// Cuts at the end of a record. What is before the last piece_max bytes leaves as parts.
    fn cut(&mut self, end: Lsn, stamp: Stamp, nop: bool, pieces: &mut Vec<Piece>) {
        let bytes = |from: Lsn| usize::try_from(end.0.saturating_sub(from.0)).unwrap_or(usize::MAX);
        while bytes(self.tail_begin) > self.piece_max && self.tail.len() > self.piece_max {
            self.part(self.piece_max, Stamp::Part, false, pieces);
        }
        self.part(bytes(self.tail_begin), stamp, nop, pieces);
    }

    fn part(&mut self, bytes: usize, stamp: Stamp, nop: bool, pieces: &mut Vec<Piece>) {
        let data: Bytes = self.tail.split_to(bytes.min(self.tail.len())).freeze();
        let begin = self.tail_begin;
        self.tail_begin = Lsn(begin.0 + data.len() as u64);
        let (begin, end) = (LogIndex(begin.0), LogIndex(self.tail_begin.0));
        pieces.push(Piece { begin, end, data: Some(data), stamp, nop });
    }
}
