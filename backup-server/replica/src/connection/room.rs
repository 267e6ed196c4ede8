//! Room for what connections bring and groups have not taken.
//!
//! The hosts of a group share its [`InputRoom`], and get of it in the order in which they ask. A connection has a little
//! room of its own: for beacons, so that neither a stall nor another host's flood ends a lease, and for work, so that many
//! small frames that cost much do not take the room that hosts of the group share.

use std::pin::Pin;
use std::sync::Arc;
use tidelock_planted::Bug;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Unit of a group's room.
const UNIT_BYTES: u64 = 1024;
/// Beacons of one connection that may wait. One that finds no room is dropped: another follows soon.
const BEACONS_MAX: usize = 1024;
/// Work that waiting frames of one connection may cause, in bytes that are read for them.
const WORK_MAX_BYTES: u64 = 1 << 30;
/// Unit of work.
const WORK_UNIT_BYTES: u64 = 4 << 10;

/// Room that is taken, until this is dropped.
#[derive(Debug, Default)]
pub struct Taken {
    _bytes: Option<OwnedSemaphorePermit>,
    _work: Option<OwnedSemaphorePermit>,
}

/// A request for room. `None`: the group has ended.
pub(super) type Asked = Pin<Box<dyn Future<Output = Option<Taken>> + Send>>;

/// Room of a group, in bytes of frames.
#[derive(Clone, Debug)]
pub struct InputRoom {
    units: Arc<Semaphore>,
    all: u32,
}

impl InputRoom {
    /// Room for frames of so many bytes.
    #[must_use]
    pub fn new(max_bytes: u64) -> Self {
        let all = u32::try_from(max_bytes / UNIT_BYTES).unwrap_or(u32::MAX / 2).max(1);
        Self { units: Arc::new(Semaphore::new(all as usize)), all }
    }

    /// Waits for room. A frame that is larger than all of the room takes all of it.
    pub async fn take(self, bytes: u64) -> Option<Taken> {
        let units = u32::try_from(bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX);
        let bytes = self.units.acquire_many_owned(units.clamp(1, self.all)).await.ok()?;
        Some(Taken { _bytes: Some(bytes), _work: None })
    }

    /// The group ends: there is no room any more.
    pub fn close(&self) {
        self.units.close();
    }
}

/// Room of one connection.
#[derive(Debug)]
pub(super) struct OwnRoom {
    beacons: Arc<Semaphore>,
    work: Arc<Semaphore>,
}

impl Default for OwnRoom {
    fn default() -> Self {
        let work = Semaphore::new((WORK_MAX_BYTES / WORK_UNIT_BYTES) as usize);
        Self { beacons: Arc::new(Semaphore::new(BEACONS_MAX)), work: Arc::new(work) }
    }
}

impl OwnRoom {
    /// Room for a beacon, if there is.
    pub(super) fn beacon(&self) -> Option<Taken> {
        let permit = Arc::clone(&self.beacons).try_acquire_owned().ok()?;
        Some(Taken { _bytes: Some(permit), _work: None })
    }

    /// Asks for room for frames of so many bytes that cause so much work.
    pub(super) fn ask(&self, input: InputRoom, bytes: u64, work_bytes: u64) -> Asked {
        let bytes = if tidelock_planted::is(Bug::FullGroupIsRead) { 0 } else { bytes };
        let own = Arc::clone(&self.work);
        let units = work_bytes.min(WORK_MAX_BYTES).div_ceil(WORK_UNIT_BYTES) as u32;
        Box::pin(async move {
            // The connection's own room first: shared room is not held while that is waited for.
            let work = match units {
                0 => None,
                units => Some(own.acquire_many_owned(units).await.ok()?),
            };
            Some(Taken { _work: work, ..input.take(bytes).await? })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::{Context, Poll, Waker};

    fn poll(asked: &mut Asked) -> Poll<Option<Taken>> {
        asked.as_mut().poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn beacons_of_one_connection_take_no_room_from_another() {
        let (loud, quiet) = (OwnRoom::default(), OwnRoom::default());
        let taken: Vec<_> = std::iter::from_fn(|| loud.beacon()).collect();
        assert_eq!(taken.len(), BEACONS_MAX);
        assert!(quiet.beacon().is_some());
    }

    #[test]
    fn frames_that_cause_much_work_wait_for_those_before_them_on_their_connection_alone() {
        let (loud, quiet) = (OwnRoom::default(), OwnRoom::default());
        let input = InputRoom::new(1 << 20);
        let Poll::Ready(Some(first)) = poll(&mut loud.ask(input.clone(), 1, 1 << 40)) else {
            panic!("all of it was free")
        };
        let mut next = loud.ask(input.clone(), 1, 1);
        assert!(poll(&mut next).is_pending());
        let free = u64::from(input.all) - 1;
        assert_eq!(
            input.units.available_permits() as u64,
            free,
            "nothing shared is held meanwhile"
        );
        assert!(poll(&mut quiet.ask(input.clone(), 1, 1 << 40)).is_ready());
        drop(first);
        assert!(poll(&mut next).is_ready());
    }

    #[test]
    fn room_is_given_in_order_and_ends_with_the_group() {
        let (one, other, input) = (OwnRoom::default(), OwnRoom::default(), InputRoom::new(4096));
        let Poll::Ready(Some(all)) = poll(&mut one.ask(input.clone(), 1 << 40, 0)) else {
            panic!("a frame larger than the room takes all of it")
        };
        let mut large = other.ask(input.clone(), 4096, 0);
        let mut small = one.ask(input.clone(), 1, 0);
        assert!(poll(&mut large).is_pending() && poll(&mut small).is_pending());
        drop(all);
        assert!(poll(&mut small).is_pending(), "the other host has asked before");
        let Poll::Ready(Some(large)) = poll(&mut large) else { panic!("all of it is free") };
        drop(large);
        assert!(poll(&mut small).is_ready());
        input.close();
        assert!(matches!(poll(&mut one.ask(input, 1, 0)), Poll::Ready(None)));
    }
}
