//! The gate's packet-filter rules, kept in place whatever others do to the packet filter; between a change of them and
//! the look that finds them in place nothing is left to them.

use super::{HostError, spawn};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};
use tidelock_netfilter::gate::{Gate, RulesDoubt, RulesFound};
use tidelock_netfilter::rules::{Change, RuleChanges};

/// How often rules are looked at if nobody tells of a change: of settings beside them (`bridge-nf-call-iptables`) nobody does.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// How soon again if they could not be looked at, or not be put back, or are not relied on yet.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(1);
/// The pause after a first look, in which more changes may come.
const PAUSE_MIN: Duration = Duration::from_millis(10);
/// How often the pause is doubled: up to 160 ms.
const DOUBLED_MAX: u32 = 4;
/// Without a look for this long, the next pause is the first one again.
const QUIET: Duration = Duration::from_secs(1);

/// Puts back rules that somebody takes away, within milliseconds where the kernel tells of it. On a thread of its own,
/// which runs the packet filter's tools and ends when there is no gate any more.
pub(super) fn start(gate: &Arc<Mutex<Option<Gate>>>) -> Result<(), HostError> {
    let doubt = gate.lock().expect("no panic while held").as_ref().map(Gate::rules_doubt);
    let Some(doubt) = doubt else { return Ok(()) };
    let gate = Arc::downgrade(gate);
    spawn("rules", move || keep(&gate, &doubt)).map(drop)
}

fn keep(gate: &Weak<Mutex<Option<Gate>>>, doubt: &RulesDoubt) {
    // Before the first look: what has changed by then it sees, and what changes later is told.
    let mut changes = listen();
    let mut pace = Pace::default();
    loop {
        let began = Instant::now();
        let Some((found, relies)) = look(gate) else { return };
        // Putting them back is told, too. What somebody has changed since they were looked at the next look will show.
        let own = changes.as_mut().filter(|_| found == RulesFound::PutBack);
        let mut change = own.and_then(RuleChanges::drain);
        let mut pause_until = Instant::now() + pace.pause_after(found, began.elapsed());
        while let Some(left) = pause_until.checked_duration_since(Instant::now()) {
            let heard = hear(&mut changes, left, doubt);
            if heard == Some(Change::Ours) {
                pause_until = pause_until.min(Instant::now() + PAUSE_MIN);
            }
            change = change.max(heard);
        }
        let is_settled = found != RulesFound::Failing && relies;
        let next = if is_settled { LOOK_EVERY } else { TRY_AGAIN_AFTER };
        let waits_since = Instant::now();
        if change.is_none() {
            hear(&mut changes, next, doubt);
        }
        if waits_since.elapsed() >= QUIET {
            pace = Pace::default();
        }
    }
}

/// What was found, and whether rules that were put back are relied on again. `None`: there is no gate. One that was
/// stopped leaves its rules.
fn look(gate: &Weak<Mutex<Option<Gate>>>) -> Option<(RulesFound, bool)> {
    let gate = gate.upgrade()?;
    let mut gate = gate.lock().expect("no panic while held");
    let gate = gate.as_mut()?;
    // Asked before the look: what it finds in place counts from then on.
    let relies = gate.relies_on_rules();
    let found = gate.follow_rules();
    Some((found, relies && gate.relies_on_rules()))
}

/// Waits for a change, but no longer than this. Rules that may be gone are not relied on from that moment on.
fn hear(
    changes: &mut Option<RuleChanges>,
    at_most: Duration,
    doubt: &RulesDoubt,
) -> Option<Change> {
    let Some(changes) = changes else {
        std::thread::sleep(at_most);
        return None;
    };
    let change = changes.wait(at_most);
    if change == Some(Change::Ours) {
        doubt.doubt();
    }
    change
}

fn listen() -> Option<RuleChanges> {
    match RuleChanges::open() {
        Ok(changes) => Some(changes),
        Err(error) => {
            tracing::warn!(
                %error,
                "gate: the kernel does not tell of changes of the packet filter: rules that somebody takes away are \
                 missed for up to {LOOK_EVERY:?}"
            );
            None
        }
    }
}

/// A look runs tools: whoever else changes nftables all day must not keep us running them all day.
#[derive(Debug, Default)]
struct Pace {
    /// Looks that found nothing, one soon after the other.
    idle_looks: u32,
}

impl Pace {
    /// How long the next look has to wait after one that took this long.
    fn pause_after(&mut self, found: RulesFound, took: Duration) -> Duration {
        // Who has taken rules away may do so again at once: a restart of nftables.service flushes when it stops, and
        // when it starts.
        if found == RulesFound::PutBack {
            self.idle_looks = 0;
            return PAUSE_MIN;
        }
        let pause = PAUSE_MIN * (1 << self.idle_looks.min(DOUBLED_MAX));
        self.idle_looks = self.idle_looks.saturating_add(1);
        pause.max(took)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_that_find_nothing_get_fewer() {
        let mut pace = Pace::default();
        let ms = |found, took_ms, pace: &mut Pace| {
            pace.pause_after(found, Duration::from_millis(took_ms)).as_millis()
        };
        let idle: Vec<_> = (0..7).map(|_| ms(RulesFound::InPlace, 1, &mut pace)).collect();
        assert_eq!(idle, [10, 20, 40, 80, 160, 160, 160]);
        assert_eq!(ms(RulesFound::InPlace, 300, &mut pace), 300, "no more than half of the time");
        assert_eq!(ms(RulesFound::PutBack, 300, &mut pace), 10, "it may happen again at once");
        assert_eq!(ms(RulesFound::InPlace, 1, &mut pace), 10);
        assert_eq!(ms(RulesFound::InPlace, 1, &mut pace), 20);
    }
}
