//! A sharded store at two sites, with production's agents between their logs (rule 13).
//!
//! The store stands in for one that uses the library: shards with a leader and followers, clocks that are off by at most ε,
//! clients that write to one shard after another. Leaders change at both sites, agents of deposed leaders go on for a while,
//! messages are lost, repeated and reordered, watermark services die. At the end everything must have arrived, or a disaster
//! comes and all shards must be recovered at one cut.

mod journalled;
mod mail;
mod primary;
mod replicated;
mod site;
mod store;

use crate::counts::Counts;
use crate::failure::Checked;
use crate::rng::Rng;

/// Runs a store from beginning to end.
pub(crate) fn live(seed: u64, counts: &mut Counts) -> Checked {
    // The rest of the seed has a sequence of its own: what is added here moves nothing there.
    let mut store = store::Store::new(Rng::new(seed ^ 0x7368_6172_6473));
    let result = store.live();
    counts.shard_updates += store.updates();
    counts.shard_recoveries += u64::from(store.is_recovered());
    result
}
