//! The keeper of one shard's standby: it sees to it that there is a copy of the primary, that it runs and follows, and promotes
//! it when it is told to.

use super::super::Event;
use super::record::{Kept, Record};
use super::source::SourceSocket;
use super::{At, Connected, Known, Promote, Shared, lock, past};
use crate::server::clock;
use crate::server::stores::config::StandbysSection;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tidelock_shard::LogIndex;
use tidelock_shard::link::Origin;
use tidelock_shard_logs::{KeptStatus, Promoted, StandbyState, StandbyStatus};
use tidelock_standbys::Listening;
use tidelock_targets::postgres::{
    Expected, PostgresError, Promotion, Role, Server, Settings, Source, State,
};
use tidelock_wal::Lsn;
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;

/// Time between two looks at a standby. Nothing of the log waits for it.
const TEND_EACH: Duration = Duration::from_secs(1);
/// Pause after something has failed.
const RETRY: Duration = Duration::from_secs(5);
/// A standby that has not replayed the log up to the cut by then is given up; another `recover` goes on.
const REPLAYS_WITHIN: Duration = Duration::from_secs(3600);

/// Begin of the name of a kept copy.
const KEPT: &str = "kept-";
/// Name of a server that is promoted at an earlier cut.
const PAST: &str = "recovered";

/// A reason for which a standby is not what it should be.
#[derive(Debug, Error)]
pub(in crate::server::stores) enum Fault {
    #[error(transparent)]
    Postgres(#[from] PostgresError),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Other(String),
}

/// Whose standby it is.
pub(super) struct Of {
    pub store: String,
    /// The shard's name.
    pub name: String,
    pub settings: Arc<StandbysSection>,
    /// False: only the command line is there, and a standby is looked at, and started for a recovery alone.
    pub serves: bool,
}

/// The keeper.
pub(super) struct Keeper {
    of: Of,
    shared: Arc<Shared>,
    connected: Arc<Connected>,
    events: mpsc::Sender<Event>,
    known: watch::Receiver<Known>,
    record: Option<Record>,
    /// The socket at which the standby gets its log.
    listening: Option<Listening>,
    /// A promoted server is started once: later its operator may stop it.
    has_started: bool,
}

impl Keeper {
    pub(super) fn new(
        of: Of,
        shared: Arc<Shared>,
        connected: Arc<Connected>,
        events: mpsc::Sender<Event>,
        known: watch::Receiver<Known>,
    ) -> Self {
        let (record, listening, has_started) = (None, None, false);
        Self { of, shared, connected, events, known, record, listening, has_started }
    }

    pub(super) async fn run(mut self, mut orders: mpsc::Receiver<Promote>) {
        loop {
            // An order is carried out at once: a copy that is being taken is of no use in a recovery.
            let order = tokio::select! {
                biased;
                order = orders.recv() => Some(order),
                tended = self.tend() => {
                    self.shared.has_looked.send_replace(true);
                    let pause = match tended {
                        Ok(()) => TEND_EACH,
                        Err(fault) => self.failed(&fault),
                    };
                    tokio::select! {
                        order = orders.recv() => Some(order),
                        changed = self.known.changed() => {
                            if changed.is_err() {
                                return;
                            }
                            None
                        }
                        () = sleep(pause) => None,
                    }
                }
            };
            match order {
                None => {}
                Some(None) => return,
                Some(Some(Promote { at, done })) => {
                    let promoted = self.promote(at).await;
                    if let Err(fault) = &promoted {
                        self.failed(fault);
                    }
                    let _ = done.send(promoted.map_err(|fault| fault.to_string()));
                }
            }
        }
    }

    fn set(&self, change: impl FnOnce(&mut StandbyStatus)) {
        change(&mut lock(&self.shared.status));
    }

    /// Puts a fault into the status, and into the log if it is another one than before.
    fn failed(&self, fault: &Fault) -> Duration {
        let text = fault.to_string();
        self.set(|status| {
            status.copied_kib = None;
            if status.problem.as_ref() != Some(&text) {
                let Of { store, name, .. } = &self.of;
                tracing::error!(store, shard = name, "the standby: {text}");
                status.problem = Some(text);
            }
        });
        RETRY
    }

    /// Does what is missing.
    async fn tend(&mut self) -> Result<(), Fault> {
        let known = self.known.borrow_and_update().clone();
        let Some(origin) = &known.origin else { return Ok(()) };
        self.open(origin).await?;
        if self.is_promoted() {
            return self.tend_promoted().await;
        }
        // A recovery at an earlier cut was broken off, and is to be ordered again.
        let is_broken_off = self.record.as_ref().is_some_and(|record| record.past.is_some());
        if is_broken_off || !self.of.serves {
            let state = self.server()?.status().await?;
            self.tell(&state);
            return Ok(());
        }
        self.listen()?;
        self.replace_unusable(&known).await?;
        let record = self.record.as_mut().ok_or_else(none)?;
        let mut state = record.server.status().await?;
        if state == State::Stopped {
            match record.server.whole().await {
                Err(PostgresError::NoData { .. }) => {
                    if known.is_recovered || !known.is_led {
                        self.set(|status| status.state = StandbyState::Waiting);
                        return Ok(());
                    }
                    self.copy(origin).await?;
                }
                found => drop(found?),
            }
            self.start(Role::Standby).await?;
            state = self.server()?.status().await?;
        }
        if let State::Standby { is_paused: true, .. } = state {
            // The primary's settings have grown: they are read at the start.
            let record = self.record.as_mut().ok_or_else(none)?;
            record.server.stop().await?;
            self.start(Role::Standby).await?;
            state = self.server()?.status().await?;
        }
        self.tell(&state);
        if let State::Unknown { said } = state {
            return Err(Fault::Other(format!("the standby does not answer: {said}")));
        }
        if let State::Primary { .. } = state {
            return self.is_primary(&state, known.is_recovered);
        }
        if let State::Standby { received, .. } = state
            && !known.is_recovered
        {
            self.keep_copies().await?;
            self.tell_unneeded(received, origin).await;
        }
        self.set(|status| status.problem = None);
        Ok(())
    }

    /// The standby as it is on record, or a new one.
    async fn open(&mut self, origin: &Origin) -> Result<(), Fault> {
        if self.record.is_none() {
            self.make_dir()?;
            past::remove_left_over(&self.shared.dir).await?;
            self.record = Record::read(&self.shared.dir)?;
            self.come_back().await?;
        }
        if self.record.is_none() {
            let (Of { store, name, settings, .. }, shard) = (&self.of, &self.shared.shard);
            let port = settings.port.checked_add(*shard).ok_or_else(|| {
                Fault::Other(format!("`port` {} leaves none for shard {name}", settings.port))
            })?;
            let of_standby = Settings {
                name: format!("{store}-{name}"),
                upstream: Some(self.shared.dir.join("log")),
                cut: None,
                listen_addresses: settings.listen_addresses.clone(),
                port,
                access: settings.access.clone(),
                options: Vec::new(),
            };
            let expected = Expected { major: origin.version, system: origin.system_id };
            let (dir, site) = (self.shared.dir.join("standby"), settings.site(origin.version));
            let record = Record::new(Server::new(dir, site, expected, of_standby).await?);
            record.write(&self.shared.dir)?;
            self.record = Some(record);
        }
        self.tell_kept();
        let (socket_dir, port) = {
            let server = self.server()?;
            (server.socket_dir(), server.settings.port)
        };
        self.set(|status| (status.socket_dir, status.port) = (socket_dir, port));
        Ok(())
    }

    /// A standby that is on record gets the settings of the configuration, for its next start. A copy that is not on record was
    /// not kept.
    async fn come_back(&mut self) -> Result<(), Fault> {
        let Some(record) = &mut self.record else { return Ok(()) };
        let settings = &mut record.server.settings;
        settings.listen_addresses.clone_from(&self.of.settings.listen_addresses);
        settings.access.clone_from(&self.of.settings.access);
        for entry in fs::read_dir(&self.shared.dir)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let is_kept = record.kept.iter().any(|kept| kept.server.dir() == path);
            if name.starts_with(KEPT) && !is_kept {
                record.server.beside(path).remove().await?;
            }
        }
        Ok(())
    }

    /// Makes the directory. PostgreSQL's user passes through those of the server above it.
    fn make_dir(&self) -> io::Result<()> {
        fs::create_dir_all(&self.shared.dir)?;
        let settings = &self.of.settings;
        let above = settings.above.iter().chain([&settings.dir, &self.shared.dir]);
        for path in above {
            let mode = fs::metadata(path)?.permissions().mode();
            if mode & 0o001 == 0 {
                fs::set_permissions(path, fs::Permissions::from_mode(mode & 0o7777 | 0o001))?;
            }
        }
        Ok(())
    }

    fn server(&self) -> Result<&Server, Fault> {
        self.record.as_ref().map(|record| &record.server).ok_or_else(none)
    }

    fn is_promoted(&self) -> bool {
        self.record.as_ref().is_some_and(|record| record.promoted.is_some())
    }

    fn listen(&mut self) -> Result<(), Fault> {
        if self.listening.is_none() {
            let user = self.server()?.user();
            self.listening = Some(self.shared.hub.listen(
                self.shared.shard,
                None,
                &self.shared.dir.join("log"),
                user,
            )?);
        }
        Ok(())
    }

    /// Starts the server, which is on record before and after.
    async fn start(&mut self, role: Role) -> Result<(), Fault> {
        let record = self.record.as_mut().ok_or_else(none)?;
        record.write(&self.shared.dir)?;
        record.server.start(role).await?;
        record.write(&self.shared.dir)?;
        Ok(())
    }

    /// Removes a copy that the journal cannot serve, once a new one can be taken.
    async fn replace_unusable(&mut self, known: &Known) -> Result<(), Fault> {
        if !known.is_led || known.is_recovered {
            return Ok(());
        }
        let record = self.record.as_mut().ok_or_else(none)?;
        let Some(why) = self.connected.take_unusable(&record.server.settings.name) else {
            return Ok(());
        };
        let Of { store, name, .. } = &self.of;
        tracing::warn!(store, shard = name, why, "the standby is made anew");
        record.server.stop().await?;
        record.server.remove().await?;
        record.write(&self.shared.dir)?;
        Ok(())
    }

    /// Copies the primary, through the link.
    async fn copy(&mut self, origin: &Origin) -> Result<(), Fault> {
        let (Of { store, name, settings, .. }, shard) = (&self.of, &self.shared.shard);
        let record = self.record.as_ref().ok_or_else(none)?;
        if let Some(problem) = record.server.check(0).await.into_iter().next() {
            return Err(problem.into());
        }
        let dir = self.shared.dir.join("source");
        let user = record.server.user();
        let _socket = SourceSocket::listen(&dir, user, *shard, self.events.clone())?;
        let source = Source {
            conninfo: format!(
                "host='{}' port={} user='{}' sslmode=disable gssencmode=disable application_name=tidelock-copy",
                quoted(&dir.display().to_string()),
                tidelock_standbys::SOCKET_PORT,
                quoted(&settings.primary_user),
            ),
            password: settings.password().map_err(Fault::Other)?,
            fast_checkpoint: true,
            rate_max_kib: None,
        };
        tracing::info!(
            store,
            shard = name,
            timeline = origin.timeline,
            "the primary is being copied"
        );
        self.set(|status| {
            (status.state, status.problem, status.copied_kib) =
                (StandbyState::Copying, None, Some((0, 0)));
        });
        let copied = record
            .server
            .bootstrap(&source, |copying| {
                self.set(|status| status.copied_kib = Some((copying.done_kib, copying.all_kib)));
            })
            .await?;
        self.set(|status| status.copied_kib = None);
        tracing::info!(store, shard = name, usable_from = %copied.usable_from, "the primary is copied");
        Ok(())
    }

    /// Kept copies, for whoever looks at the past.
    fn tell_kept(&self) {
        let kept = self.record.as_ref().map(|record| record.kept.clone()).unwrap_or_default();
        self.set(|status| status.kept = kept.iter().map(|kept| kept.status).collect());
        *lock(&self.shared.kept) = kept;
    }

    fn tell(&self, state: &State) {
        let index = |lsn: Option<Lsn>| lsn.map(|lsn| LogIndex(lsn.0));
        self.set(|status| {
            (status.state, status.received, status.replayed) = match state {
                State::Stopped => (StandbyState::Stopped, None, None),
                State::Recovering { .. } | State::Unknown { .. } => {
                    (StandbyState::Recovering, None, None)
                }
                State::Standby { received, replayed, .. } => {
                    (StandbyState::Following, index(*received), index(*replayed))
                }
                State::Primary { replayed, .. } => (StandbyState::Promoted, None, index(*replayed)),
            };
        });
    }

    /// Tells the store what of its log nobody here needs any more.
    async fn tell_unneeded(&self, received: Option<Lsn>, origin: &Origin) {
        // A walreceiver begins with the segment that it needs next.
        let segment = u64::from(origin.segment_bytes.max(1));
        let of_standby = received.map_or(0, |lsn| lsn.0 - lsn.0 % segment);
        let kept = self.record.iter().flat_map(|record| &record.kept).map(|kept| kept.needs_from);
        let up_to = LogIndex(kept.fold(of_standby, u64::min));
        let _ = self.events.send(Event::Unneeded { shard: self.shared.shard, up_to }).await;
    }

    /// Keeps a copy of the standby when it is time, and lets old ones go.
    async fn keep_copies(&mut self) -> Result<(), Fault> {
        let (count, every) = (self.of.settings.keep_copies, self.of.settings.copy_every);
        let now_ms = clock::now().unix_ms;
        let every_ms = u64::try_from(every.as_millis()).unwrap_or(u64::MAX);
        let record = self.record.as_mut().ok_or_else(none)?;
        let last_ms = record.kept.last().map(|kept| kept.status.at_unix_ms);
        if count > 0 && last_ms.is_none_or(|last| now_ms.saturating_sub(last) >= every_ms) {
            let mut server = record.server.clone();
            let conninfo = format!(
                "host='{}' port={} user='{}'",
                quoted(&server.socket_dir().display().to_string()),
                server.settings.port,
                quoted(server.superuser()),
            );
            let number = record.next_kept;
            server = server.beside(self.shared.dir.join(format!("{KEPT}{number}")));
            record.next_kept += 1;
            record.write(&self.shared.dir)?;
            let source =
                Source { conninfo, password: None, fast_checkpoint: true, rate_max_kib: None };
            let copied = server.bootstrap(&source, |_| {}).await?;
            let usable_from = LogIndex(copied.usable_from.0);
            let status = KeptStatus { usable_from, at_unix_ms: now_ms };
            record.kept.push(Kept { server, status, needs_from: copied.needs_from.0 });
            record.write(&self.shared.dir)?;
            self.tell_kept();
        }
        while self.record.as_ref().is_some_and(|record| record.kept.len() > count) {
            // A holder of a copy is served before it goes.
            let Ok(_none_held) = self.shared.holds.try_write() else { return Ok(()) };
            let record = self.record.as_mut().ok_or_else(none)?;
            record.kept[0].server.remove().await?;
            record.kept.remove(0);
            record.write(&self.shared.dir)?;
            self.tell_kept();
        }
        Ok(())
    }

    async fn tend_promoted(&mut self) -> Result<(), Fault> {
        if self.of.serves && !std::mem::replace(&mut self.has_started, true) {
            self.start(Role::Primary).await?;
        }
        let state = self.server()?.status().await?;
        self.tell(&state);
        let promoted = self.record.as_ref().and_then(|record| record.promoted);
        self.set(|status| (status.promoted, status.problem) = (promoted, None));
        Ok(())
    }

    /// A server that is found promoted, and is not on record as such.
    fn is_primary(&mut self, state: &State, is_recovered: bool) -> Result<(), Fault> {
        let State::Primary { timeline, replayed } = *state else { return Ok(()) };
        if !is_recovered {
            return Err(Fault::Other(
                "somebody has promoted the standby: it follows nothing any more. Stop it and remove its directory, and it is \
                 made anew"
                    .to_owned(),
            ));
        }
        // The backup server was stopped when it had promoted it.
        let promotion = Promotion { replayed, timeline, waited_ms: 0, promoted_ms: 0 };
        self.promoted(promotion, replayed.unwrap_or_default()).map(drop)
    }

    fn promoted(&mut self, promotion: Promotion, up_to: Lsn) -> Result<Promoted, Fault> {
        let record = self.record.as_mut().ok_or_else(none)?;
        let promoted = Promoted {
            at: LogIndex(promotion.replayed.unwrap_or(up_to).0),
            timeline: promotion.timeline,
            ready_ms: promotion.waited_ms,
            promoted_ms: promotion.promoted_ms,
        };
        record.promoted = Some(promoted);
        record.server.settings.upstream = None;
        record.write(&self.shared.dir)?;
        self.has_started = true;
        self.listening = None;
        self.set(|status| {
            (status.state, status.promoted, status.problem) =
                (StandbyState::Promoted, Some(promoted), None);
        });
        Ok(promoted)
    }

    /// Promotes the standby at a position, or a copy of an earlier one at a position of the past.
    async fn promote(&mut self, at: At) -> Result<Promoted, Fault> {
        let (At::Final(up_to) | At::Past(up_to)) = at;
        if let Some(promoted) = self.record.as_ref().and_then(|record| record.promoted) {
            if matches!(at, At::Past(_)) && promoted.at != LogIndex(up_to.0) {
                return Err(Fault::Other(format!(
                    "it was promoted at {} already; a view shows it at {up_to}",
                    Lsn(promoted.at.0)
                )));
            }
            return Ok(promoted);
        }
        let origin = self.known.borrow().origin.clone();
        self.open(&origin.ok_or_else(none)?).await?;
        match at {
            At::Final(_) => self.ready_standby(up_to).await?,
            At::Past(_) => self.ready_past(up_to).await?,
        }
        let promotion = self.server()?.promote(up_to, REPLAYS_WITHIN).await?;
        let Of { store, name, .. } = &self.of;
        tracing::warn!(store, shard = name, %up_to, timeline = promotion.timeline, "the standby is promoted");
        self.promoted(promotion, up_to)
    }

    /// The standby runs, and can come to the position.
    async fn ready_standby(&mut self, up_to: Lsn) -> Result<(), Fault> {
        self.listen()?;
        let state = lock(&self.shared.status).state;
        if state != StandbyState::Following {
            let copied = self.server()?.whole().await?;
            if copied.usable_from > up_to {
                return Err(
                    PostgresError::TooNew { usable_from: copied.usable_from, cut: up_to }.into()
                );
            }
        }
        self.start(Role::Standby).await
    }

    /// A server at an earlier position takes the place of the standby, which is removed.
    async fn ready_past(&mut self, cut: Lsn) -> Result<(), Fault> {
        let is_there = self.record.as_ref().and_then(|record| record.past) == Some(cut.0);
        if !is_there || matches!(self.server()?.whole().await, Err(PostgresError::NoData { .. })) {
            let past = self.shared.base(cut).map_err(Fault::Other)?.at(PAST, cut).await?;
            let record = self.record.as_mut().ok_or_else(none)?;
            record.server.stop().await?;
            record.server.remove().await?;
            record.server = past.server.clone();
            // Complete: all of its log is here. With a target, a promotion would fail because nothing follows it.
            record.server.stop().await?;
            let settings = &mut record.server.settings;
            (settings.upstream, settings.cut) = (None, None);
            settings.listen_addresses.clone_from(&self.of.settings.listen_addresses);
            record.past = Some(cut.0);
            record.write(&self.shared.dir)?;
            past.keep()?;
        }
        self.start(Role::Standby).await
    }
}

fn none() -> Fault {
    Fault::Other("there is no standby: the primary was never copied".to_owned())
}

/// A value of a connection string.
fn quoted(text: &str) -> String {
    text.replace('\\', "\\\\").replace('\'', "\\'")
}
