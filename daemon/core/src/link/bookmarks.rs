//! Bookmarks that were asked for and not answered: they outlive a connection, and are asked for again on the next.

use super::port::BookmarkDone;
use std::collections::BTreeMap;
use tidelock_protocol::message::{Bookmark, BookmarkPoint, Message};

/// Those of one member's channel.
#[derive(Debug, Default)]
pub(super) struct Bookmarks(BTreeMap<u64, (Bookmark, BookmarkDone)>);

impl Bookmarks {
    /// One that is new. Returns what to ask the backup for.
    pub(super) fn begin(&mut self, wanted: Bookmark, done: BookmarkDone) -> Message {
        let message = Message::Bookmark(Box::new(wanted.clone()));
        self.0.insert(wanted.id, (wanted, done));
        message
    }

    /// What to ask for on a new connection: all that somebody still waits for.
    pub(super) fn again(&mut self) -> impl Iterator<Item = Message> {
        self.0.retain(|_, (_, done)| !done.is_canceled());
        self.0.values().map(|(wanted, _)| Message::Bookmark(Box::new(wanted.clone())))
    }

    /// The backup has answered.
    pub(super) fn answered(&mut self, id: u64, outcome: Result<BookmarkPoint, String>) {
        if let Some((_, done)) = self.0.remove(&id) {
            // Nobody may wait for it any more.
            let _ = done.send(outcome);
        }
    }

    /// None of them can be set any more.
    pub(super) fn give_up(&mut self, reason: &str) {
        for (_, (_, done)) in std::mem::take(&mut self.0) {
            let _ = done.send(Err(reason.to_owned()));
        }
    }
}
