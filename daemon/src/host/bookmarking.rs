//! Bookmarks that are set from this host: the backup answers when it has all that was written before, which may be after
//! the next outage. Whoever has asked looks again and again; if nobody does, it is given up.

use super::{Host, HostGroup};
use crate::clock;
use crate::control::{BookmarkState, BookmarkWish, Bookmarking, ControlError, ControlErrorKind};
use futures_channel::oneshot;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tidelock_daemon_core::link::LinkState;
use tidelock_daemon_core::link::port::ToLink;
use tidelock_protocol::bounds;
use tidelock_protocol::message::{Bookmark, BookmarkPoint};

/// Who has not looked for so long does not wait any more.
const LOOKED_WITHIN: Duration = Duration::from_secs(30);
/// Of one group, at a time.
const WAITING_MAX: usize = 32;

/// Those of one group.
#[derive(Debug, Default)]
pub(super) struct Bookmarks(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// Ids of all runs of the daemon differ: the backup tells by them what it has done already.
    last_id: u64,
    waiting: BTreeMap<u64, Waiting>,
}

#[derive(Debug)]
struct Waiting {
    outcome: oneshot::Receiver<Result<BookmarkPoint, String>>,
    looked_at: Instant,
}

fn refused(text: impl Into<String>) -> ControlError {
    ControlError::new(ControlErrorKind::Refused, text)
}

impl Host {
    /// Asks the backup, now or when it is there.
    pub(super) fn bookmark(
        &self,
        group: &HostGroup,
        wish: BookmarkWish,
    ) -> Result<Bookmarking, ControlError> {
        // The backup ends the connection of a host that sends what is no name.
        if !bounds::is_name(&wish.name) {
            return Err(refused(format!(
                "{:?} cannot be a name: letters, digits, `.`, `_` and `-`, not beginning with `.` or `-`, at most 64",
                wish.name
            )));
        }
        let mut inner = group.bookmarks.0.lock().expect("no panic while held");
        inner.waiting.retain(|_, waiting| waiting.looked_at.elapsed() < LOOKED_WITHIN);
        if inner.waiting.len() >= WAITING_MAX {
            return Err(refused(format!("{WAITING_MAX} bookmarks of this group wait already")));
        }
        let id = (inner.last_id + 1).max(clock::wall_ms() * 1000);
        inner.last_id = id;
        // Any member can ask for the group. One with disks has a backlog, which is asked for first.
        let members = || group.members.iter();
        let asks = members().find(|m| m.writer.is_some()).or_else(|| members().next());
        let channel = asks.expect("a group here has a member here").channel;
        let BookmarkWish { name, expires_in_ms, moves } = wish;
        let (done, outcome) = oneshot::channel();
        let wanted = Bookmark { id, name, expires_in_ms, moves };
        let link = self.link.lock().expect("no panic while held");
        let asks = (channel, ToLink::Bookmark(wanted, done));
        let is_asked = link.as_ref().is_some_and(|link| link.send(asks).is_ok());
        if !is_asked {
            return Err(refused("the daemon is stopping"));
        }
        inner.waiting.insert(id, Waiting { outcome, looked_at: Instant::now() });
        Ok(Bookmarking { id })
    }

    /// How far one is. Its end is told once.
    pub(super) fn bookmarked(
        &self,
        group: &HostGroup,
        id: u64,
    ) -> Result<BookmarkState, ControlError> {
        let mut inner = group.bookmarks.0.lock().expect("no panic while held");
        let waiting = inner.waiting.get_mut(&id);
        let waiting = waiting.ok_or_else(|| refused("no such bookmark waits here"))?;
        let ended = match waiting.outcome.try_recv() {
            Ok(Some(outcome)) => outcome,
            Err(oneshot::Canceled) => Err("the link to the backup has ended".to_owned()),
            Ok(None) => {
                waiting.looked_at = Instant::now();
                return Ok(BookmarkState::Waiting { why: self.why_it_waits(group) });
            }
        };
        inner.waiting.remove(&id);
        let point = ended.map_err(refused)?;
        Ok(BookmarkState::Set {
            unix_ms: point.hlc.physical_ms(),
            hlc: point.hlc.to_string(),
            seqs: point.seqs.into_iter().collect(),
            without: point.without,
        })
    }

    fn why_it_waits(&self, group: &HostGroup) -> String {
        match &*self.link_state.borrow() {
            LinkState::Up { .. } => {}
            LinkState::Connecting { .. } => return "the backup is not connected".to_owned(),
            LinkState::Down { reason, .. } => {
                return format!("the backup is not connected: {reason}");
            }
        }
        let writers = group.members.iter().filter_map(|m| m.writer.as_ref());
        let stalled = writers.filter_map(|writer| writer.link_stats.stalled()).next();
        stalled.unwrap_or_else(|| {
            "the backup does not have everything yet that was written before".to_owned()
        })
    }
}
