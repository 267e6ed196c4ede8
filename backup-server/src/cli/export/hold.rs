//! The point of an export that is not ended is held by a pin, so that the same command can go on with it after a kill.
//!
//! The pin's name follows from the file's, so whoever goes on finds it, and nobody has to keep it in mind. It goes with
//! the export's end; of one that is given up it expires.

use crate::cli::client::Client;
use crate::server::control::{Reply, Request};
use anyhow::{Result, bail};
use std::path::Path;
use tidelock_replica::travel::moment::Moment;
use tidelock_replica::travel::when::When;
use tidelock_store::journal::MarkKind;

/// How long the point of an export that is not gone on with is held.
const HELD_MS: u64 = 24 * 3_600_000;

/// The pin of the export into a file.
pub(super) struct Hold<'a> {
    client: &'a Client,
    group: &'a str,
    name: String,
    point: When,
    /// Why there is none.
    refused: Option<anyhow::Error>,
}

impl<'a> Hold<'a> {
    /// Holds a point for a day from now on: this one, or, if the export was begun before, the one that it has. If no pin
    /// can be set, the export goes on without.
    pub(super) async fn take(
        client: &'a Client,
        group: &'a str,
        out: &Path,
        at: &When,
        begun: Option<&Moment>,
    ) -> Result<Self> {
        let path = std::path::absolute(out)?;
        let digest = blake3::hash(path.as_os_str().as_encoded_bytes()).to_hex();
        let name = format!("export-{}", &digest[..12]);
        let point = When::Bookmark(name.clone());
        let mut hold = Self { client, group, name, point, refused: None };
        let at = begun.map_or_else(|| at.clone(), |begun| When::Hlc(begun.hlc_raw));
        // The window may have passed a point that was begun, which the pin still has.
        if begun.is_some() && hold.set(hold.point()).await.is_ok() {
            return Ok(hold);
        }
        if let Err(error) = hold.set(at.clone()).await {
            (hold.point, hold.refused) = (at, Some(error));
        }
        Ok(hold)
    }

    async fn set(&self, at: When) -> Result<()> {
        let request = Request::Mark {
            group: self.group.to_owned(),
            name: self.name.clone(),
            kind: MarkKind::Pin,
            at,
            expires_in_ms: Some(HELD_MS),
            moves: true,
        };
        match self.client.ask(&request).await? {
            Reply::Marked { .. } => Ok(()),
            _ => bail!("the server answered something else"),
        }
    }

    /// Says so if the point is not held.
    pub(super) fn warn(&self) {
        if let Some(error) = &self.refused {
            eprintln!("should this be interrupted, its point is not held: {error:#}");
        }
    }

    /// The point.
    pub(super) fn point(&self) -> When {
        self.point.clone()
    }

    /// It is made: nothing has to be held any more.
    pub(super) async fn give_up(self) {
        let (group, name) = (self.group.to_owned(), self.name);
        // One that has expired meanwhile is as good as one that is removed.
        let _ = self.client.ask(&Request::Unmark { group, name, kind: MarkKind::Pin }).await;
    }
}
