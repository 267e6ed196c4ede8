//! Sums of what happens in seeds, for reports.

/// Defines the counts.
macro_rules! counts {
    ($($(#[$doc:meta])* $count:ident,)*) => {
        /// Counts, for reports.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
        pub struct Counts {
            $($(#[$doc])* pub $count: u64,)*
        }

        impl Counts {
            /// Adds those of another seed.
            pub fn add(&mut self, one: &Counts) {
                $(self.$count += one.$count;)*
            }

            /// Each by its name.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($count), self.$count)),*].into_iter()
            }
        }
    };
}

counts! {
    /// Events.
    events,
    /// Guests' writes completed.
    writes,
    /// Packets that left for clients.
    packets,
    /// Packets of members whose tag was merged.
    merged,
    /// Those that were dropped instead, because their time was too far ahead.
    ahead,
    /// Packets of members to others of the same host.
    handed_over,
    /// Packets of members that needed no tag, because C covered them.
    covered,
    /// Packets of members that could not be tagged, and waited instead.
    untagged,
    /// Packets that left past the gate's queue: the programs saw that C covers them, or that nothing is held.
    past_queue,
    /// Idle records.
    idles,
    /// Members that were held until it was known what their guests had heard.
    floors,
    /// Faults injected.
    faults,
    /// Runs of daemons.
    daemon_runs,
    /// Starts of daemons in the middle of which the power failed.
    cut_starts,
    /// Recoveries on copies of the backup's disk, compared byte by byte.
    probes,
    /// Views at a cut of a group that went on, compared byte by byte.
    pins,
    /// States of the past, compared byte by byte.
    pasts,
    /// Bookmarks and pins that were set.
    marks,
    /// Copies of the backup's disk on which bytes were flipped, all that is left compared byte by byte.
    rots,
    /// Pairs of points that operators have used.
    travels,
    /// Snapshots that were made or moved, compared byte by byte.
    snapshots,
    /// Journals that could not be opened, and were cut.
    repairs,
    /// Statuses of hosts.
    statuses,
    /// Updates of sharded stores.
    shard_updates,
    /// Recoveries of sharded stores.
    shard_recoveries,
    /// Recoveries of groups.
    recoveries,
    /// Groups that were protected again from the site at which they were recovered.
    homecomings,
    /// Groups that were switched over.
    switches,
    /// Hosts that have gone over together with others.
    handovers,
    /// Initial copies and resyncs completed.
    copies,
    /// Resyncs of only what an activity log had.
    mapped_resyncs,
    /// Requests that waited for an activity log.
    logged,
    /// Maps that were given up because they were full.
    overflows,
    /// How often a writer waited for a ceiling of its times.
    ceilings,
    /// Runs of daemons that went on after a clean end, with nothing compared.
    clean_starts,
    /// Members and disks that came or went.
    changes,
    /// Of those, disks that became larger.
    grown,
    /// Groups that went on without the backup, on one host.
    degrades,
    /// Of those, how many came back by themselves.
    returns,
    /// Seeds in which everything came back while guests wrote almost as much as links carry.
    narrow_returns,
    /// Heartbeats that owner loops were asked for.
    heartbeats,
    /// How often one was missed.
    missed,
    /// Verifications that have looked at everything.
    verified,
    /// Of those, how many have told of a difference.
    differing,
    /// Bytes that were changed behind everyone's back.
    spoilt,
    /// Runs that served guests before the backup was reached.
    unreached,
    /// Guests' writes in them that have no record.
    unrecorded,
    /// Of those runs, how many answered clients.
    answered,
    /// Records that were admitted while some before them were on disk only.
    spilled,
    /// Processes that went on with a backlog on disk.
    gone_on,
    /// Daemons that died within the append of a record, or right behind it.
    torn,
    /// Streams that stood because a backlog was full.
    stood,
    /// Of those, how many were recorded again, with a comparison.
    returned,
}
