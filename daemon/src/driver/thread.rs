//! The thread of a member: the owner loop on an io_uring.

use super::ring::Around;
use super::token::Token;
use super::{DiskSetup, OpenDisk, RingDriver};
use crate::clock;
use crate::nbd_tap::{Limits, NbdTap};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use thiserror::Error;
use tidelock_daemon_core::activity::place::LogPlace;
use tidelock_daemon_core::link::port::ToLink;
use tidelock_daemon_core::owner::{Clocks, Owner, OwnerParts, ToOwner};
use tidelock_protocol::ids::Channel;
use tidelock_storage::files::Files;
use tidelock_uring::{EventFd, LocalFile, Ring, RingError};
use tokio::sync::{Notify, mpsc};

/// Operations that fit into one submission.
const RING_ENTRIES: u32 = 512;

/// The activity log's file, open.
#[derive(Debug)]
pub struct LogFile {
    /// The file, locked.
    pub file: LocalFile,
    /// Place of the file.
    pub place: LogPlace<Files>,
}

/// The parts of a member's thread.
pub struct Parts {
    /// The loop.
    pub owner: OwnerParts<OpenDisk>,
    /// The sockets of its disks, by id.
    pub disks: Vec<DiskSetup>,
    /// The activity log's file, if there is one.
    pub log_file: Option<LogFile>,
    /// Messages for the loop.
    pub messages: Receiver<ToOwner>,
    /// Signalled when there is something.
    pub wake: EventFd,
    /// To the link.
    pub link: mpsc::UnboundedSender<(Channel, ToLink)>,
    /// The member's number there.
    pub channel: Channel,
    /// Told when writes wait for a higher ceiling of their times.
    pub ceiling_wanted: Arc<Notify>,
}

/// Why a member's thread has ended.
#[derive(Debug, Error)]
pub enum DriverError {
    /// No ring can be made.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The loop cannot go on, or the ring.
    #[error(transparent)]
    Loop(#[from] io::Error),
}

type UringDriver = RingDriver<Ring, Ports>;

/// Ways from a member's thread to others.
struct Ports {
    link: mpsc::UnboundedSender<(Channel, ToLink)>,
    channel: Channel,
    ceiling_wanted: Arc<Notify>,
    log_file: Option<LogFile>,
}

/// Runs a member's loop until it has ended. `wake` and sockets are looked at on this thread alone.
pub fn run(parts: Parts) -> Result<(), DriverError> {
    let Parts { owner: of_owner, disks, log_file, messages, wake, link, channel, ceiling_wanted } =
        parts;
    let mut ring = Ring::new(RING_ENTRIES)?;
    tracing::debug!(member = of_owner.member, ring = ?ring.mode(), "owner loop");
    ring.wait_event(Token::Wake.to_u64(), &wake);
    let listeners = disks.iter().map(|disk| disk.listener.clone()).collect();
    let clocks = clocks();
    let pool = of_owner.pool.clone();
    let tap = NbdTap::new(
        of_owner.member.clone(),
        disks.into_iter().map(|disk| disk.tap).collect(),
        pool.clone(),
        Limits::OF_DISK,
        of_owner.stats.clone(),
        clocks.now,
    );
    let log_fd = log_file.as_ref().map(|log| log.file.fd().clone());
    let ports = Ports { link, channel, ceiling_wanted, log_file };
    let driver = RingDriver::new(ring, ports, pool, listeners, tap, log_fd);
    let mut owner = Owner::new(of_owner, driver, clocks);
    owner.begin();
    let ended = run_rounds(&mut owner, &messages, &wake);
    super::end(&mut owner);
    Ok(ended?)
}

fn run_rounds(
    owner: &mut Owner<UringDriver>,
    messages: &Receiver<ToOwner>,
    wake: &EventFd,
) -> io::Result<()> {
    while !owner.has_ended() {
        owner.driver().ring.submit_and_wait(1)?;
        super::set_time(owner, clocks());
        while let Some(completion) = owner.driver().ring.next_completion() {
            if completion.token == Token::Wake.to_u64() {
                owner.driver().ring.wait_event(completion.token, wake);
                messages.try_iter().for_each(|message| owner.hear(message));
            } else {
                super::completed(owner, completion);
            }
        }
        super::turn(owner)?;
    }
    Ok(())
}

fn clocks() -> Clocks {
    Clocks { now: clock::mono_now(), wall_ms: clock::wall_ms() }
}

impl Around for Ports {
    fn to_link(&mut self, message: ToLink) {
        // The link ends after the owner loops, or with the daemon.
        let _ = self.link.send((self.channel, message));
    }

    fn want_ceiling(&mut self) {
        self.ceiling_wanted.notify_one();
    }

    fn remove_log(&mut self) -> io::Result<()> {
        let Some(LogFile { place, .. }) = &self.log_file else { return Ok(()) };
        let with_path =
            |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", place.path().display()));
        place.remove().map_err(with_path)?;
        self.log_file = None;
        Ok(())
    }
}
