//! The backlog: what was received of the log, and is not durable at the backup.

use bytes::Bytes;
use std::collections::VecDeque;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::record::Payload;
use tidelock_shard::{Entry, LogIndex};

/// Stamp of a piece, as far as it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stamp {
    /// No transaction ends in it.
    Part,
    /// The server's, by a clock that is believed.
    Taken(Hlc),
    /// The server's, by a clock that is not: nothing from here on is sent.
    Unknown,
    /// Later than whatever the server's clock may have said: the end of a time of doubt.
    Doubted(Hlc),
}

/// A part of the log that becomes an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub begin: LogIndex,
    pub end: LogIndex,
    /// `None`: a jump.
    pub data: Option<Bytes>,
    pub stamp: Stamp,
    /// The end of a transaction that is nothing but a NOP, or a jump.
    pub nop: bool,
}

/// Entries for one message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Read {
    /// The backlog begins behind the place: the log must be received again.
    Gone,
    /// Entries, perhaps none, and the end of a time of doubt if one of them is in it.
    Entries(Vec<Entry>, Option<DoubtIn>),
}

/// The first entry of a message that is in a time of doubt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DoubtIn {
    /// Place in the message.
    pub at: usize,
    pub through: Hlc,
}

/// Pieces without a gap between them.
#[derive(Debug)]
pub(crate) struct Backlog {
    pieces: VecDeque<Piece>,
    bytes: usize,
    end: LogIndex,
    /// Begin of the first piece with an unknown stamp.
    held_from: Option<LogIndex>,
    held: usize,
}

impl Backlog {
    /// A backlog without pieces, at a place of the log.
    pub fn at(end: LogIndex) -> Self {
        Self { pieces: VecDeque::new(), bytes: 0, end, held_from: None, held: 0 }
    }

    pub fn end(&self) -> LogIndex {
        self.end
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn push(&mut self, piece: Piece) {
        debug_assert_eq!(piece.begin, self.end);
        self.bytes += piece.data.as_ref().map_or(0, Bytes::len);
        self.end = piece.end;
        if piece.stamp == Stamp::Unknown {
            self.held_from.get_or_insert(piece.begin);
            self.held += 1;
        }
        self.pieces.push_back(piece);
    }

    /// End of what can be sent, as far as stamps go.
    pub fn sendable(&self) -> LogIndex {
        self.held_from.unwrap_or(self.end)
    }

    /// Number of pieces that wait for the clock, and are the end of a transaction.
    pub fn held(&self) -> usize {
        self.held
    }

    /// Gives this stamp to all pieces with an unknown one. True if there are any.
    pub fn settle(&mut self, stamp: Hlc) -> bool {
        self.held = 0;
        if self.held_from.take().is_none() {
            return false;
        }
        for piece in &mut self.pieces {
            if piece.stamp == Stamp::Unknown {
                piece.stamp = Stamp::Doubted(stamp);
            }
        }
        true
    }

    /// Drops pieces that end up to a place.
    pub fn trim(&mut self, up_to: LogIndex) {
        while self.pieces.front().is_some_and(|piece| piece.end <= up_to) {
            let Some(piece) = self.pieces.pop_front() else { break };
            self.bytes -= piece.data.as_ref().map_or(0, Bytes::len);
            if self.held_from.is_some_and(|from| from < piece.end) {
                self.held -= 1;
                let unknown = |piece: &&Piece| piece.stamp == Stamp::Unknown;
                self.held_from = self.pieces.iter().find(unknown).map(|piece| piece.begin);
            }
        }
    }

    /// Entries that end after a place and not after another one, up to about this many bytes and at least one.
    pub fn read(&self, after: LogIndex, up_to: LogIndex, bytes_max: usize) -> Read {
        let begin = self.pieces.front().map_or(self.end, |piece| piece.begin);
        if after < begin {
            return Read::Gone;
        }
        let first = self.pieces.partition_point(|piece| piece.end <= after);
        let (mut entries, mut bytes, mut doubt) = (vec![], 0, None);
        for piece in self.pieces.range(first..) {
            let stamp = match piece.stamp {
                _ if piece.end > up_to => break,
                Stamp::Unknown => break,
                Stamp::Part => Hlc::default(),
                Stamp::Taken(stamp) => stamp,
                Stamp::Doubted(through) => {
                    doubt.get_or_insert(DoubtIn { at: entries.len(), through });
                    through
                }
            };
            // Another agent of the shard may have cut the log elsewhere.
            let skipped = after.0.saturating_sub(piece.begin.0);
            let data = piece.data.as_ref().map(|data| {
                let skipped = usize::try_from(skipped).unwrap_or(usize::MAX).min(data.len());
                Payload::new(data.slice(skipped..))
            });
            bytes += data.as_ref().map_or(0, |data| data.data().len());
            entries.push(Entry { end: piece.end, stamp, data, nop: piece.nop });
            if bytes >= bytes_max {
                break;
            }
        }
        Read::Entries(entries, doubt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(begin: u64, end: u64, stamp: Stamp) -> Piece {
        let data = Some((begin..end).map(|at| at as u8).collect());
        Piece { begin: LogIndex(begin), end: LogIndex(end), data, stamp, nop: false }
    }

    fn read(backlog: &Backlog, after: u64, up_to: u64) -> Option<Vec<(u64, u64, Vec<u8>)>> {
        match backlog.read(LogIndex(after), LogIndex(up_to), 1000) {
            Read::Gone => None,
            Read::Entries(entries, _) => {
                let plain = |entry: Entry| {
                    let data = entry.data.map(|data| data.data().to_vec()).unwrap_or_default();
                    (entry.end.0, entry.stamp.0, data)
                };
                Some(entries.into_iter().map(plain).collect())
            }
        }
    }

    #[test]
    fn what_is_read_begins_at_the_place_wherever_the_log_was_cut() {
        let mut backlog = Backlog::at(LogIndex(10));
        backlog.push(piece(10, 14, Stamp::Part));
        backlog.push(piece(14, 18, Stamp::Taken(Hlc(7))));
        assert_eq!(read(&backlog, 9, 99), None);
        let whole = vec![(14, 0, vec![10, 11, 12, 13]), (18, 7, vec![14, 15, 16, 17])];
        assert_eq!(read(&backlog, 10, 99), Some(whole.clone()));
        assert_eq!(read(&backlog, 10, 17), Some(whole[..1].to_vec()));
        assert_eq!(read(&backlog, 16, 99), Some(vec![(18, 7, vec![16, 17])]));
        assert_eq!(read(&backlog, 18, 99), Some(vec![]));
        backlog.trim(LogIndex(17));
        assert_eq!((read(&backlog, 13, 99), backlog.bytes()), (None, 4));
        backlog.trim(LogIndex(18));
        assert_eq!((backlog.end(), backlog.bytes()), (LogIndex(18), 0));
        assert_eq!(read(&backlog, 18, 99), Some(vec![]));
    }

    #[test]
    fn nothing_from_the_first_unknown_stamp_on_is_read_until_it_is_known() {
        let mut backlog = Backlog::at(LogIndex(0));
        backlog.push(piece(0, 4, Stamp::Part));
        backlog.push(piece(4, 8, Stamp::Unknown));
        backlog.push(piece(8, 12, Stamp::Part));
        assert_eq!((backlog.sendable(), backlog.held()), (LogIndex(4), 1));
        assert_eq!(read(&backlog, 0, 99).unwrap().len(), 1);
        assert!(backlog.settle(Hlc(5)) && !backlog.settle(Hlc(6)));
        assert_eq!(backlog.sendable(), LogIndex(12));
        let Read::Entries(entries, doubt) = backlog.read(LogIndex(0), LogIndex(99), 1000) else {
            panic!()
        };
        assert_eq!((entries.len(), doubt), (3, Some(DoubtIn { at: 1, through: Hlc(5) })));
    }
}
