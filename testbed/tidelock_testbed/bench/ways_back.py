"""The sections on restarts, resyncs and outages."""

from __future__ import annotations

from pathlib import Path

COMEBACK = """## (o) It comes back

A guest that writes 4 KiB after 4 KiB, and tries to connect again each millisecond while its server is gone: from the
moment that `tidelockd` is killed, or asked to end, until its next write is completed. It is started again at once; RTT
{rtt_ms} ms. A QEMU guest tries again as its `reconnect-delay` says."""

RESYNC = """Then {resynced_mib} MiB are written while the link is cut, the daemon dies with them, and the sites are
compared over a link of {link_mib_per_s} MiB/s, which lets {queue_ms} ms of its rate wait; the backup's data is in
memory. Beside it the writes of another group of that host, which is in mode sync: each takes as long as its commit."""

OUTAGE = """## (p) An outage

Resident memory while the link is cut and the guest writes 4 KiB at random places, {iops} a second, with a backlog of
{backlog_mib} MiB: of a group whose policy is `async after 5s`, which goes on and keeps in its map what it owes, and of
one that waits."""


def write_comeback(_directory: Path, result: dict) -> list[str]:
    """Part (o)."""
    lines = [*COMEBACK.format(**result).splitlines(), "", "| the daemon is | next write after, ms |", "|---|---|"]
    lines += [f"| {how} | {_spread(gap, 0)} |" for how, gap in result["restarts"].items()]
    live = result["live_p50_ms"]
    return [
        *lines,
        "",
        *RESYNC.format(**result).splitlines(),
        "",
        "| | |",
        "|---|---|",
        f"| a plain TCP stream (iperf3), MiB/s | {_spread(result['plain_mib_per_s'], 1)} |",
        f"| the resync, MiB/s | {_spread(result['resync_mib_per_s'], 1)} |",
        f"| a commit beside, before it, ms | {_spread(live['before'], 1)} |",
        f"| and meanwhile, ms | {_spread(live['meanwhile'], 1)} |",
        "",
    ]


def write_outage(_directory: Path, result: dict) -> list[str]:
    """Part (p)."""
    lines = [*OUTAGE.format(**result).splitlines(), ""]
    lines += [
        "| group | for, s | process | first, MiB | at half | at the end | once it is back |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in result["outages"].items():
        for process in found["first_mib"]:
            cells = " | ".join(f"{found[f'{when}_mib'][process]:g}" for when in ("first", "half", "end", "after"))
            lines.append(f"| {name} | {found['seconds']:g} | `{process}` | {cells} |")
    return [*lines, ""]


def _spread(spread: dict, digits: int) -> str:
    low, middle, high = (f"{spread[name]:,.{digits}f}" for name in ("min", "median", "max"))
    return f"{middle} ({low} to {high})"
