//! Messages under way: lost, repeated and reordered while there are faults.

use crate::rng::Rng;

/// A direction between two agents.
#[derive(Clone, Debug)]
pub(super) struct Mail<M> {
    /// Messages with their time of arrival, in nanoseconds.
    under_way: Vec<(u64, M)>,
}

impl<M> Default for Mail<M> {
    fn default() -> Self {
        Self { under_way: Vec::new() }
    }
}

impl<M: Clone> Mail<M> {
    /// Sends a message; `delay_ns` is the usual time.
    pub(super) fn send(
        &mut self,
        message: M,
        now: u64,
        delay_ns: u64,
        faults: bool,
        rng: &mut Rng,
    ) {
        if faults && rng.chance(1, 16) {
            return;
        }
        if faults && rng.chance(1, 16) {
            self.under_way.push((now + rng.span(4 * delay_ns), message.clone()));
        }
        let late = if faults { rng.span(delay_ns) } else { delay_ns };
        self.under_way.push((now + late, message));
    }

    /// A message that has arrived.
    pub(super) fn take(&mut self, now: u64) -> Option<M> {
        let (at, _) = self.under_way.iter().enumerate().min_by_key(|(_, (due, _))| *due)?;
        (self.under_way[at].0 <= now).then(|| self.under_way.swap_remove(at).1)
    }
}
