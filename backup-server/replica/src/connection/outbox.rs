//! Messages that wait to be sent to a host. Acknowledgements are cumulative, so one that was not sent yet is replaced by
//! the next. With that the queue stays short, and the connection of a host that does not read its answers ends.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tidelock_protocol::ids::Channel;
use tidelock_protocol::message::Message;
use tokio::sync::Notify;

/// The most messages that wait.
const MESSAGES_MAX: usize = 4096;

/// The outbox of one connection.
#[derive(Debug, Default)]
pub struct Outbox {
    state: Mutex<State>,
    ready: Notify,
}

#[derive(Debug, Default)]
struct State {
    messages: VecDeque<(Channel, Message)>,
    closed: bool,
    overflowed: bool,
}

impl Outbox {
    /// Puts a message in.
    pub fn send(&self, channel: Channel, message: Message) {
        let mut state = self.lock();
        if state.closed {
            return;
        }
        let cumulative = is_cumulative(&message);
        let full = state.messages.len() >= MESSAGES_MAX;
        match state.messages.back_mut() {
            Some((last, old)) if cumulative && is_cumulative(old) && *last == channel => {
                *old = message;
            }
            _ if full => {
                state.overflowed = true;
                state.closed = true;
            }
            _ => state.messages.push_back((channel, message)),
        }
        drop(state);
        self.ready.notify_one();
    }

    /// The connection ends after the messages that are in it.
    pub fn close(&self) {
        self.lock().closed = true;
    }

    /// Takes the messages.
    #[must_use]
    pub fn take(&self) -> VecDeque<(Channel, Message)> {
        std::mem::take(&mut self.lock().messages)
    }

    /// True if the host did not read for so long that messages were lost.
    #[must_use]
    pub fn has_overflowed(&self) -> bool {
        self.lock().overflowed
    }

    /// Waits until something was put in since the last call.
    pub async fn changed(&self) {
        self.ready.notified().await;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// True if the next message of this kind says all that this one does.
fn is_cumulative(message: &Message) -> bool {
    matches!(message, Message::Progress(_))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidelock_protocol::ids::{MonoNanos, Seq};
    use tidelock_protocol::message::Progress;

    fn progress(seq: u64) -> Message {
        Message::Progress(Progress { durable: Seq(seq), ..Progress::default() })
    }

    #[test]
    fn acknowledgements_are_merged_and_order_is_kept() {
        let outbox = Outbox::default();
        let lease = Message::Lease { sent_at: MonoNanos(1) };
        for message in [progress(1), progress(2), lease.clone(), progress(3)] {
            outbox.send(Channel(1), message);
        }
        outbox.send(Channel(2), progress(9));
        let taken: Vec<_> = outbox.take().into_iter().map(|(_, m)| m).collect();
        assert_eq!(taken, [progress(2), lease, progress(3), progress(9)]);
        outbox.close();
        outbox.send(Channel(1), progress(4));
        assert!(outbox.take().is_empty(), "nothing goes out after the end");
    }

    #[test]
    fn a_host_that_does_not_read_is_cut_off() {
        let outbox = Outbox::default();
        for n in 0..=MESSAGES_MAX as u64 {
            outbox.send(Channel(0), Message::Lease { sent_at: MonoNanos(n) });
        }
        assert!(outbox.has_overflowed());
    }
}
