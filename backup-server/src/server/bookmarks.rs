//! Bookmarks that a host asks for (`tidelock bookmark`): set as soon as the cut has what had been written when it
//! asked.

use super::control::ask;
use super::inbox::Event;
use super::registry::Registry;
use super::travel::{self, WantedMark};
use tidelock_protocol::bounds;
use tidelock_protocol::message::{Bookmark, BookmarkPoint};
use tidelock_replica::group::Link;
use tidelock_replica::group::MarkError;
use tidelock_replica::travel::when::When;
use tidelock_store::journal::{HostRequest, MarkKind};

/// Waits for the cut, and sets one. An error is for people at the host.
pub(super) async fn set(
    registry: &Registry,
    group: &str,
    link: Link,
    host: String,
    wanted: Bookmark,
) -> Result<BookmarkPoint, String> {
    let Bookmark { id, name, expires_in_ms, moves } = wanted;
    if !bounds::is_name(&name) {
        return Err(MarkError::Name(name).to_string());
    }
    if registry.config().options(group).retention.window_ms == 0 {
        return Err(format!(
            "the backup keeps no past of group {group}, so that a bookmark would be gone at once: set \
             retention.window there"
        ));
    }
    let asked_by = HostRequest { host, id };
    // What will be refused is refused at once.
    let marks = ask(registry, group, |done| Event::Marks { done }).await??;
    let taken = marks.into_iter().find(|mark| mark.name == name).map(|named| named.mark);
    if let Some(taken) = taken.filter(|mark| mark.asked_by.as_ref() != Some(&asked_by)) {
        if taken.kind == MarkKind::Pin || taken.asked_by.is_none() {
            let kind = taken.kind.word();
            return Err(format!(
                "there is a {kind} {name}, set at the backup: choose another name"
            ));
        }
        if !moves {
            let (kind, at) = (taken.kind, taken.point.hlc);
            return Err(MarkError::Exists { name, kind, at }.to_string());
        }
    }
    let without = ask(registry, group, |done| Event::Cover { link, done }).await??;
    let (kind, at, asked_by) = (MarkKind::Bookmark, When::Latest, Some(asked_by));
    let mark = WantedMark { name, kind, at, expires_in_ms, moves, asked_by };
    let set = travel::mark(registry, group, mark).await?;
    let seqs = set.at.seqs.into_iter().collect();
    Ok(BookmarkPoint { hlc: set.at.hlc_raw, seqs, without })
}
