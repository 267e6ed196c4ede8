//! Operators' orders that may have to wait in their group's loop: what is told meanwhile, and whether the operator is
//! still there.

use super::control::{Reply, ask, find, reply};
use super::inbox::Event;
use super::registry::Registry;
use std::io;
use tidelock_replica::group_loop::{Answer, Order, Wait};
use tidelock_replica::history::History;
use tidelock_storage::files::OpenFile;
use tokio::io::{AsyncBufRead, AsyncBufReadExt};
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::{oneshot, watch};

/// The way back to an operator. Whoever has asked is gone when the other end is dropped.
#[derive(Debug)]
pub struct Asker {
    /// The latest only: a command line that does not read keeps nothing here.
    waits: watch::Sender<Option<Wait>>,
    done: oneshot::Sender<Answer>,
}

impl Asker {
    /// An asker, and the ends of it that its task listens to.
    pub(super) fn new() -> (Self, watch::Receiver<Option<Wait>>, oneshot::Receiver<Answer>) {
        let (waits, told) = watch::channel(None);
        let (done, answer) = oneshot::channel();
        (Self { waits, done }, told, answer)
    }

    pub(super) fn is_gone(&self) -> bool {
        self.done.is_closed()
    }

    pub(super) fn waits(&self, wait: Wait) {
        self.waits.send_replace(Some(wait));
    }

    pub(super) fn answer(self, answer: Answer) {
        // The asker may be gone.
        let _ = self.done.send(answer);
    }
}

/// Gives a group an order and waits for its answer. Fails when the command line is gone: the group forgets the order
/// then.
pub(super) async fn order(
    registry: &Registry,
    group: &str,
    order: Order,
    reader: &mut (impl AsyncBufRead + Unpin),
    writer: &mut OwnedWriteHalf,
) -> io::Result<Result<Answer, String>> {
    let owner = match find(registry, group) {
        Ok(owner) => owner,
        Err(reason) => return Ok(Err(reason)),
    };
    let (asker, mut told, mut answer) = Asker::new();
    let closed = || Ok(Err(format!("group {group} is being closed")));
    if !owner.inbox.push(Event::Order { order, asker }) {
        return closed();
    }
    loop {
        tokio::select! {
            biased;
            answer = &mut answer => return answer.map_or_else(|_| closed(), |answer| Ok(Ok(answer))),
            Ok(()) = told.changed() => {
                let wait = told.borrow_and_update().clone();
                if let Some(wait) = wait {
                    reply(writer, &waiting(wait)).await?;
                }
            }
            gone = ends(reader) => return Err(gone),
        }
    }
}

/// Gives a group an order that waits for nothing but the disk, and waits for its answer.
pub(super) async fn order_at_once(
    registry: &Registry,
    group: &str,
    order: Order,
) -> Result<Answer, String> {
    let owner = find(registry, group)?;
    let (asker, _told, answer) = Asker::new();
    let closed = || format!("group {group} is being closed");
    if !owner.inbox.push(Event::Order { order, asker }) {
        return Err(closed());
    }
    answer.await.map_err(|_| closed())
}

/// The past of a group, with everything that had arrived when it was asked for, as far as there is room.
pub(super) async fn history(registry: &Registry, group: &str) -> Result<History<OpenFile>, String> {
    order_at_once(registry, group, Order::Settle).await?;
    ask(registry, group, |done| Event::History { done }).await?
}

fn waiting(wait: Wait) -> Reply {
    match wait {
        Wait::Lease { remaining_ms, kept_by } => Reply::Waiting { remaining_ms, kept_by },
        Wait::Room(reason) => Reply::NoRoom { reason },
    }
}

/// Waits until the other side has closed the connection.
async fn ends(reader: &mut (impl AsyncBufRead + Unpin)) -> io::Error {
    loop {
        match reader.fill_buf().await {
            Ok([]) => return io::ErrorKind::BrokenPipe.into(),
            Ok(bytes) => {
                let len = bytes.len();
                reader.consume(len);
            }
            Err(error) => return error,
        }
    }
}
