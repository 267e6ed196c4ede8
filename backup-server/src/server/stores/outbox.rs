//! Messages that wait to be sent to a host of a store. Of a shard only the newest reply counts, because replies are
//! cumulative, and so does only the newest progress: what waits is bounded by the number of shards and by the windows of
//! tunnels.

use bytes::BytesMut;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tidelock_protocol::frame;
use tidelock_protocol::ids::Channel;
use tidelock_shard::link::StoreMessage;
use tidelock_shard_logs::Refusal;
use tokio::sync::Notify;

#[derive(Default)]
pub(super) struct Outbox {
    state: Mutex<State>,
    ready: Notify,
}

#[derive(Default)]
struct State {
    replies: BTreeMap<u16, StoreMessage>,
    progress: Option<StoreMessage>,
    beaten: Option<StoreMessage>,
    /// Messages of tunnels, in order.
    others: VecDeque<(Channel, StoreMessage)>,
    end: Option<Refusal>,
}

impl Outbox {
    pub(super) fn send(&self, channel: Channel, message: StoreMessage) {
        let mut state = self.lock();
        match message {
            StoreMessage::Reply(_) => {
                state.replies.insert(channel.0, message);
            }
            StoreMessage::Progress { .. } => state.progress = Some(message),
            StoreMessage::Beaten { .. } => state.beaten = Some(message),
            _ => state.others.push_back((channel, message)),
        }
        drop(state);
        self.ready.notify_one();
    }

    /// The store has ended the connection.
    pub(super) fn end(&self, why: Refusal) {
        self.lock().end = Some(why);
        self.ready.notify_one();
    }

    /// Appends what waits. An error: the connection is to be ended for that, once the bytes are out.
    pub(super) fn take(&self, out: &mut BytesMut) -> Result<(), Refusal> {
        let mut state = self.lock();
        let State { replies, progress, beaten, others, end } = &mut *state;
        for (shard, reply) in std::mem::take(replies) {
            frame::encode_control(Channel(shard), &reply, out);
        }
        for message in progress.take().into_iter().chain(beaten.take()) {
            frame::encode_control(Channel(0), &message, out);
        }
        for (channel, message) in std::mem::take(others) {
            frame::encode_control(channel, &message, out);
        }
        end.take().map_or(Ok(()), Err)
    }

    /// Waits until there is something to take.
    pub(super) async fn changed(&self) {
        self.ready.notified().await;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidelock_protocol::hlc::Hlc;
    use tidelock_protocol::message::RefusalKind;
    use tidelock_shard::{Reply, Standing, Verdict};

    #[test]
    fn what_waits_is_bounded_and_the_newest_counts() {
        let outbox = Outbox::default();
        let reply = |attempt| {
            let verdict = Verdict::Taken(Standing::default());
            StoreMessage::Reply(Reply { attempt, verdict })
        };
        for attempt in 0..100_000 {
            outbox.send(Channel(3), reply(attempt));
            let progress = StoreMessage::Progress { watermark: Hlc(attempt), updated: Hlc(0) };
            outbox.send(Channel(0), progress);
        }
        outbox.end((RefusalKind::Invalid, "a lie".into()));
        let mut out = BytesMut::new();
        assert!(outbox.take(&mut out).is_err());
        assert!(out.len() < 200, "{} bytes", out.len());
        let mut last = BytesMut::new();
        frame::encode_control(Channel(3), &reply(99_999), &mut last);
        assert!(out.starts_with(&last));
        assert_eq!(outbox.take(&mut out), Ok(()));
    }
}
