"""The sections on restarts, resyncs, outages and planned switches."""

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
{backlog_mib} MiB in memory: of a group whose policy is `async after 5s`, which fills a backlog of {on_disk_mib} MiB
on disk, and keeps in its map what it owes when that is full; and of one in the policy `hold`, whose guest waits when
memory is full."""

SWITCHOVER = """## (q) A planned switch

`tidelock switchover`, and `tidelock-backup recover` as soon as it has ended: for how long a disk is not written to,
from the last write that was completed at one site to the first at the other, and for how long clients of a row store on
another disk get no answer, from the last to the first that was asked for afterwards. Each of {turns} turns on sites of
its own; medians, and the middle half of the turns. The guests are cut off, not shut down. At idle one connection writes
4 KiB every 2 ms, under load four write without a rest; the client asks every 5 ms, and gives up an answer that the old
site will not give any more after two round trips and 0.2 s at idle, 1 s under load: most of what it waits is that."""

SWITCHOVER_PARTS = """What the clients' pause is made of, medians in ms: the command itself (its start, its questions,
its looks), what the backup does not have yet, record and gate, the lease, the recovery, and then routes, the row
store's start and its first answer. The disk can be written to as soon as the recovery offers it."""


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
        "| group | for, s | state | written, MiB | process | first, MiB | at half | end | back again |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in result["outages"].items():
        for process in found["first_mib"]:
            cells = " | ".join(f"{found[f'{when}_mib'][process]:g}" for when in ("first", "half", "end", "after"))
            did = f"{found['seconds']:g} | `{found['state']}` | {found['written_mib']:,}"
            lines.append(f"| {name} | {did} | `{process}` | {cells} |")
    return [*lines, ""]


def write_switchover(_directory: Path, result: dict) -> list[str]:
    """Part (q)."""
    lines = [*SWITCHOVER.format(**result).splitlines(), "", "| RTT ms | | the disk waits, ms | clients wait, ms |"]
    lines += ["|---|---|---|---|"]
    for row in result["rows"]:
        waited = " | ".join(_half(row["waited_ms"][who]) for who in ("guest", "clients"))
        lines.append(f"| {row['rtt_ms']:g} | {row['load']} | {waited} |")
    names = {"asked": "command", "drained": "drained", "shut": "record, gate shut", "given_up": "lease given up"}
    names |= {"recovered": "recovered", "served": "clients served"}
    lines += ["", *SWITCHOVER_PARTS.splitlines(), "", "| RTT ms | | " + " | ".join(names.values()) + " |"]
    lines += ["|---|---|" + "---|" * len(names)]
    for row in result["rows"]:
        parts = " | ".join(f"{row['parts_ms'][name]['median']:,.0f}" for name in names)
        lines.append(f"| {row['rtt_ms']:g} | {row['load']} | {parts} |")
    return [*lines, ""]


def _half(half: dict) -> str:
    return f"{half['median']:,.0f} ({half['low']:,.0f} to {half['high']:,.0f})"


def _spread(spread: dict, digits: int) -> str:
    low, middle, high = (f"{spread[name]:,.{digits}f}" for name in ("min", "median", "max"))
    return f"{middle} ({low} to {high})"
