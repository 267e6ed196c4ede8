"""The page of part (n)."""

from __future__ import annotations

from pathlib import Path

from .travels import PEERS

INTRO = """## (n) The past

A journal that keeps a window of the past, with its indexes and maps, against the journal alone: both write 4 KiB at
random places of a disk of 16 GiB and make 64 records durable at a time, in turns, in one process (medians). Indexes
and maps are made on a thread beside, as in the server. Views are opened at 40 random instants: the look at the group,
finding the instant in the journal, and the view. What is read was written before that instant. Journals are fresh, so
they are in the page cache as far as memory has room."""

RATIOS = """With them ×{ratio}; with the window, while no indexes and maps are made, ×{without_indexes_ratio}. So what
takes time is the thread beside: indexes and maps are 93 bytes more for each record of 4156, each file is synced on the
same disk between the journal's own syncs, and what it computes is a twentieth of the time of a core. The turns are in
an order that is turned around each time."""

FOLDED = """Folding, in turns with ingest in one process: all that came in leaves the window, and goes to an image of
4 GiB. Ingest is a journal of its own here, written from one end to the other, without network and checks."""

FOLDS = {
    "fresh": "an image without a block yet",
    "written": "an image of which every block was written",
    "skewed": "the same, 80 % of the writes to 20 % of it",
}

BUSY_FOLD = """Two sites without a window, so that all is folded at once: a guest writes as fast as it can
({workload}, for {seconds:g} s, to a disk of {disk_mib} MiB), on the same machine and disk. {ingest_mib_per_s} MiB/s
came to the backup and {fold_mib_per_s} MiB/s were folded meanwhile. At most {first_half} MiB waited in the first half
of the time, {second_half} in the second, {at_the_end} at its end, for {drained_s} s."""

ITSELF = """What bounds folding is the disk: by itself, past the page cache, it took {random} MiB/s of 4 KiB at random
places of an image that was written (QD 32), and {sequential} MiB/s from one end to the other, as a journal is
written. A guest's own writes go to such places, too, of its own disk."""

SITES = """Then two sites with a busy disk ({workload}, {iops:,} a second for {seconds:g} s, {disk_mib} MiB), and its
last state shown in three ways: by a view; by a chain of qcow2 overlays, each with a sixth of that time; and by raw
images on btrfs, each a reflink of the one before, with what was written since. `qemu-nbd` serves the others, all
through the page cache. They have these seven states only, and were made of views."""

OPENED = """Seconds from the command until the first 4 KiB are read through NBD, with the start of the programs; memory:
what the server's has grown by while it serves those reads, and what `qemu-nbd` has in all."""

ROLLED = """A view, and the images of a snapshot, moved back and forth by a span; the time has the command's own start
in it. A snapshot has a digest of each MiB: of random writes one second touches most of them, so that nearly all of
the images is read again however short the span is; what is written is the difference."""


def write(_directory: Path, result: dict) -> list[str]:
    """All of it."""
    ingest, commit = result["ingest"], result["commit"]
    lines = [*INTRO.splitlines(), "", "| | MiB/s |", "|---|---|"]
    lines += [f"| plain append | {_spread(ingest['plain_mib_per_s'])} |"]
    lines += [f"| with index and window | {_spread(ingest['window_mib_per_s'])} |"]
    lines += [f"| with the window, nothing made beside | {_spread(ingest['without_indexes_mib_per_s'])} |"]
    ratios = {name: _spread(ingest[name], 2) for name in ("ratio", "without_indexes_ratio")}
    lines += ["", *RATIOS.format(**ratios).splitlines(), "", *FOLDED.splitlines(), ""]
    lines += ["| folded into | ingest, MiB/s | folded, MiB/s | folded / ingest | written to the image | in all |"]
    lines += ["|---|---|---|---|---|---|"]
    for one in result["folds"]:
        rates = " | ".join(_spread(one[f"{what}_mib_per_s"]) for what in ("ingest", "fold"))
        lines.append(
            f"| {FOLDS[one['name']]} | {rates} | ×{_spread(one['ratio'], 2)} "
            f"| ×{one['written_of_all']:.2f} | ×{one['write_amplification']:.2f} |"
        )
    lines += [
        "",
        "The last two: bytes written of each byte that came in. For comparison, `qemu-img commit` of an overlay of "
        f"{commit['overlay_mib']:g} MiB, once: {commit['mib_per_s']:g} MiB/s.",
        "",
        *BUSY_FOLD.format(**result["busy_fold"], **result["busy_fold"]["waiting_mib"]).splitlines(),
        "",
        *ITSELF.format(**result["busy_fold"]["disk_itself_mib_per_s"]).splitlines(),
        "",
    ]
    lines += [
        "| journal | view opens, ms | instant found, ms | first read, µs | later, µs | raw file, µs | memory, MiB |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for one in result["views"]:
        times = [_times(one[name], scale) for name, scale in (("opened_us", 1e3), ("resolved_us", 1e3))]
        times += [_times(one[name], 1) for name in ("first_read_us", "later_read_us", "raw_read_us")]
        more = f"{one['held_kib'] / 1024:.0f}, {one['views']} views {one['views_kib'] / 1024:.0f} more"
        lines.append(f"| {_journal(one)} | {' | '.join(times)} | {more} |")
    lines += ["", "Medians, and in brackets what 99 % stay below."]
    for one in result["views"]:
        if one["one_in"] > 1:
            lines.append(
                f"The disk had no room for all payloads of {one['mib'] / 1024:g} GiB: one record in {one['one_in']} "
                "has one, the others write zeroes. Its segments are shorter: they have as many records as others."
            )
    if result["left_out_mib"]:
        sizes = ", ".join(f"{mib / 1024:g}" for mib in result["left_out_mib"])
        lines.append(f"The disk had no room for a journal of {sizes} GiB.")
    lines += ["", "What they take on the disk, and what the formula for sizing says (docs/manual/backup-disk.md):", ""]
    lines += ["| journal | segments, MiB | formula | indexes, MiB | formula | maps, MiB | formula, at most |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for one in result["views"]:
        cells = [
            f"{one[which][part] / (1 << 20):,.1f}"
            for part in ("segments", "indexes", "maps")
            for which in ("disk_bytes", "formula_bytes")
        ]
        lines.append(f"| {_journal(one)} | {' | '.join(cells)} |")
    lines += ["", *SITES.format(**result["busy"]).splitlines(), ""]
    columns = ["view", *PEERS.values()]
    lines += [f"| workload | {', IOPS | '.join(columns)}, IOPS | view / {' | view / '.join(PEERS.values())} |"]
    lines += ["|---|" + "---|" * (len(columns) + len(PEERS))]
    for row in result["reads"]:
        cells = [f"{spread['median']:,.0f}" for spread in row["iops"].values()]
        cells += [f"×{_spread(spread, 2)}" for spread in row["ratio"].values()]
        lines.append(f"| {row['workload']} | {' | '.join(cells)} |")
    lines += ["", *OPENED.splitlines(), "", "| | first 4 KiB, s | memory, MiB |", "|---|---|---|"]
    for what, name in {"view": "view", **PEERS}.items():
        lines.append(f"| {name} | {_spread(result['opening'][what], 3)} | {result['memory_mib'][what]:g} |")
    lines += ["", *ROLLED.splitlines(), "", "| rolled by | written, MiB | view, s | snapshot, s |", "|---|---|---|---|"]
    for row in result["rolling"]:
        view, snapshot = (_spread(row["seconds"][what], 2) for what in ("view", "snapshot"))
        lines.append(f"| {row['span_s']} s | {row['written_mib']:g} | {view} | {snapshot} |")
    return [*lines, ""]


def _journal(one: dict) -> str:
    return f"{one['mib'] / 1024:g} GiB" + (f", 1 in {one['one_in']}" if one["one_in"] > 1 else "")


def _spread(spread: dict, digits: int = 0) -> str:
    low, middle, high = (f"{spread[name]:,.{digits}f}" for name in ("min", "median", "max"))
    return f"{middle} ({low} to {high})"


def _times(one: dict, scale: float) -> str:
    return f"{one['p50'] / scale:,.1f} ({one['p99'] / scale:,.1f})"
