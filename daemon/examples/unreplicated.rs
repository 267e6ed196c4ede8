//! The NBD path of the daemon without a backup: every record counts as durable at once and is
//! dropped. For comparing the tap, the sequencer and the local disk with other NBD servers
//! (`make bench`), and for trying clients. It protects nothing.
//!
//!     unreplicated DISK SOCKET

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use tidelock_daemon::driver::{DiskSetup, thread};
use tidelock_daemon_core::activity::ActivityLog;
use tidelock_daemon_core::copy_job::Bounds;
use tidelock_daemon_core::link::NoGate;
use tidelock_daemon_core::link::port::{AttachedStream, FromLink, OwnerPort, ToLink};
use tidelock_daemon_core::owner::{OwnerParts, PublishPending, ToOwner};
use tidelock_daemon_core::sequencer::Settings;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Channel, DiskId, Epoch, Seq, WriterId};
use tidelock_protocol::message::{Basis, CopyState, DiskSpec, Mode, StreamState};
use tidelock_uring::{BufPool, EventFd, LocalFile, OpenRequest};

struct Nowhere;

impl PublishPending for Nowhere {
    fn publish(&self, _: Seq, _: Hlc) {}
}

fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1).map(PathBuf::from);
    let (Some(path), Some(socket)) = (args.next(), args.next()) else {
        anyhow::bail!("usage: unreplicated DISK SOCKET");
    };
    let file = LocalFile::open(&path, &OpenRequest::default())?;
    eprintln!("{}: {}", path.display(), file.io_mode());
    let size_bytes = file.len_bytes();
    let spec = DiskSpec { id: DiskId(0), name: "disk".into(), size_bytes };
    let listener = UnixListener::bind(&socket)?;
    let disk = DiskSetup::new(spec, file, listener.into(), 16)?;
    let wake = EventFd::new()?;
    let (port, messages) = OwnerPort::<ToOwner>::new(wake.clone().into());
    let port = Arc::new(port);
    let (link, mut records) = tokio::sync::mpsc::unbounded_channel();
    let acks = port.clone();
    std::thread::spawn(move || {
        while let Some((_, message)) = records.blocking_recv() {
            if let ToLink::Records { records, .. } = message
                && let Some(last) = records.last()
            {
                acks.set_acked(last.seq, last.seq);
            }
        }
    });
    let owner = OwnerParts {
        member: "unreplicated".into(),
        settings: Settings {
            writer: WriterId(0),
            mode: Mode::Pipelined,
            backlog_limit_bytes: 256 << 20,
            lock_align_bytes: disk.file.alignment().offset_bytes.into(),
        },
        disks: vec![(disk.spec.clone(), disk.file.clone())],
        port: port.clone(),
        pool: BufPool::new(64 << 20),
        pending: Arc::new(Nowhere),
        gate: Arc::new(NoGate),
        stats: Arc::default(),
        view: Arc::default(),
        pulse: Default::default(),
        copy_bounds: Bounds { window_bytes: 16 << 20, rate_bytes_per_s: 0 },
        switched_over: false,
        serves_unreached_after: None,
        several: None,
        hlc_floor: Hlc(0),
        max_clock_lead: std::time::Duration::from_secs(1),
        activity: ActivityLog::off(),
        has_log_file: false,
        backlog: None,
        left: None,
    };
    let attached = AttachedStream {
        epoch: Epoch(1),
        durable: Seq(0),
        stream: StreamState {
            last_hlc: Hlc(0),
            copy: CopyState::Whole,
            begun: None,
            basis: Basis::Clean,
        },
    };
    port.send(ToOwner::Link(FromLink::Attached { attached, first: true, compares: false }));
    thread::run(thread::Parts {
        owner,
        disks: vec![disk],
        log_file: None,
        messages,
        wake,
        link,
        channel: Channel(1),
        ceiling_wanted: Arc::default(),
    })?;
    Ok(())
}
