//! What the kernel programs take, by the kernel's own count.

use libbpf_rs::query::ProgInfoIter;
use std::collections::BTreeMap;
use std::os::fd::{FromRawFd, OwnedFd};

/// Those that are attached. What the judge takes counts as the time of the one that called it.
const NAMES: [&str; 2] = ["from_guest", "to_guest"];

/// Runs something while the kernel counts; nanoseconds for each run of a program, by its name.
/// Counting takes some tens of nanoseconds itself.
pub fn times(what: impl FnOnce()) -> BTreeMap<String, f64> {
    // SAFETY: the call takes no pointer.
    let counting = unsafe { libbpf_sys::bpf_enable_stats(libbpf_sys::BPF_STATS_RUN_TIME) };
    assert!(counting >= 0, "the kernel does not count: {}", std::io::Error::last_os_error());
    // SAFETY: the descriptor is new and nobody else's. Closing it ends the counting.
    let counting = unsafe { OwnedFd::from_raw_fd(counting) };
    let before = totals();
    what();
    let after = totals();
    drop(counting);
    let mut sums: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for (id, (name, nanos, runs)) in after {
        let (_, nanos_before, runs_before) = before.get(&id).cloned().unwrap_or_default();
        let sum = sums.entry(name).or_default();
        *sum = (sum.0 + nanos - nanos_before, sum.1 + runs - runs_before);
    }
    sums.retain(|_, (_, runs)| *runs > 0);
    let each = |(nanos, runs): (u64, u64)| (nanos as f64 / runs as f64).round();
    sums.into_iter().map(|(name, sum)| (name, each(sum))).collect()
}

/// By number: name, nanoseconds, runs.
fn totals() -> BTreeMap<u32, (String, u64, u64)> {
    ProgInfoIter::default()
        .map(|info| {
            let name = info.name.to_string_lossy().into_owned();
            (info.id, (name, info.run_time_ns, info.run_cnt))
        })
        .filter(|(_, (name, ..))| NAMES.contains(&name.as_str()))
        .collect()
}
