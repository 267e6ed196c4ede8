"""The page of part (n)."""

from __future__ import annotations

from pathlib import Path

from .travels import PEERS

INTRO = """## (n) The past

A journal that keeps a window of the past, with its indexes and maps, against the journal alone: both write 4 KiB at
random places of a disk of 16 GiB and make 64 records durable at a time, in turns, in one process. Indexes and maps are
made on a thread beside, as in the server. Folding is measured in turns with ingest: all that came in leaves the window.
Views are opened at 40 random instants: the look at the group, finding the instant in the journal, and the view. What is
read was written before that instant. Journals are fresh, so they are in the page cache as far as memory has room."""

SITES = """Then two sites with a busy disk ({workload}, {iops:,} a second for {seconds:g} s, {disk_mib} MiB), and its
last state shown in three ways: by a view; by a chain of qcow2 overlays, each with a sixth of that time; and by raw
images on btrfs, each a reflink of the one before, with what was written since. `qemu-nbd` serves the others, all
through the page cache. They have these seven states only, and were made of views."""

OPENED = """Seconds from the command until the first 4 KiB are read through NBD, with the start of the programs; memory:
what the server's has grown by while it serves those reads, and what `qemu-nbd` has in all."""

ROLLED = """A view, and the images of a snapshot, moved back and forth by a span; the time has the command's own start
in it."""


def write(_directory: Path, result: dict) -> list[str]:
    """All of it."""
    ingest, fold, commit = result["ingest"], result["fold"], result["commit"]
    lines = [*INTRO.splitlines(), "", "| | MiB/s |", "|---|---|"]
    lines += [f"| plain append | {_spread(ingest['plain_mib_per_s'])} |"]
    lines += [f"| with index and window | {_spread(ingest['window_mib_per_s'])} |"]
    lines += [f"| folded into an image | {_spread(fold['fold_mib_per_s'])} |"]
    lines += [
        f"| for comparison: `qemu-img commit` of an overlay of {commit['overlay_mib']:g} MiB, once "
        f"| {commit['mib_per_s']:g} |",
        "",
        f"Of each byte that comes in, {fold['write_amplification']:.2f} are written until it is in the image.",
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
                "has one, the others write zeroes."
            )
    if result["left_out_mib"]:
        sizes = ", ".join(f"{mib / 1024:g}" for mib in result["left_out_mib"])
        lines.append(f"The disk had no room for a journal of {sizes} GiB.")
    lines += ["", "What they take on the disk, and what the formula for sizing says (docs/backup-server.md):", ""]
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
