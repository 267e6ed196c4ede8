"""The pages of parts (i), (j) and (k): what tags and the gate's kernel programs cost, and what a release costs."""

from __future__ import annotations

from pathlib import Path

from . import release, tagging
from .charts import bar_chart
from .page import chart, details

PACKET_BYTES = 50 << 10
"""A stream's packets between namespaces, as counted at the interface: what the kernel makes of 64 KiB."""

MEMBERS = """## (i) Between two members, with tags and without

Real packets between namespaces of two guests, with one host (bridged, routed) or two between them
(`netfilter/examples/tagging-bench.rs`): a flooding `ping`, requests of 64 bytes and their replies over UDP and TCP,
one TCP stream as fast as a core carries it, `iperf3`'s one TCP stream held to 10 Gb/s, 64-byte datagrams as fast as
one thread can send them. *vector*: tags of four writers, *hlc*: of one time, while writes are under way, so that P is
ahead of C all the time. *covered*: nobody has written for a round trip, C covers P, and packets need no tag. On one
host packets carry none in any case: the sender's program raises the receiver's P in the kernel's memory
([causality](../causality.md), section 1). The hosts' interfaces have room for a tag (MTU 1600), so that segments are
equally large. All variants stand ready at once and take {rounds} short turns each. Their order is turned on and around,
so that each has every place equally often: whoever follows upon itself finds its rules and programs in the cache. After
four turns all are set up anew, elsewhere in memory: one set-up differs from the next by some 0.3 % for as long as it
stands. A figure is the median of the differences or ratios of turns beside each other, in brackets the middle half of
them. *programs*: what one run of each takes, by the kernel's own count (`BPF_ENABLE_STATS`), some tens of nanoseconds
of which are the counting.

Round trips and the fast stream have one core for all that a packet meets: what is compared is then the work on the
way, and not how soon the hypervisor wakes another core. (With a core for either end, streams on taps were no faster,
and through the queue they were faster than without a gate.) The fast stream takes turns in bursts of 16 MiB, 48 in
each turn, on a connection of that turn, with 512 KiB under way at most, and the ratio of two turns is the median of
those of their bursts: from one second to the next this machine's memory is faster or slower by half, and a window
stays within the cache on one connection and not on the next.

Throughput is also measured with guests on *taps*, whose frames a process carries between host and guest with what the
driver says of segments and checksums, as QEMU's own virtio-net does for a VM: a thread for each way of each guest.

Packet filter: {packet_filter}. With iptables a packet meets its rules and, in a chain of their own,
those that tell an interface from a later one of its name; with nft there is one chain for both.
In nftables they are one table for all members of a host, so that the second one costs a packet no hook more.
"""

MEMBERS_WORDS = """A round trip meets each program twice. Between hosts a tag needs room: the guests here are
veths, whose packets have none in front, so that the kernel copies a packet's head to make some (a VM's tap leaves
64 bytes there), and the kernel takes longer for any packet that has options. On one host none of that is there; what is
left are the programs and the rules in front of the queue.

A stream between two namespaces on veths is bound by the copying of memory alone, and its bursts stay in the cache:
without tags a packet of {packet_kib:.0f} KiB takes {packet_us:.1f} µs here, of which 3 % are {allowed_us:.2f} µs.
The two programs take {one_host_us:.1f} µs on one host and {two_hosts_us:.1f} µs between two. The rest are the rules in
front of the queue, the kernel's way into the programs, the same for every third packet's acknowledgement and, between
two hosts, the opening of the gap and the kernel's second look at a segment whose header has grown
(`tcp4_gso_segment`). At 10 Gb/s nothing of it is seen. A small datagram takes {datagram_us:.1f} µs, of which rules and
programs are a large part. The packets of VMs take the way by taps, where somebody copies them once more at either end.
"""

OUTSIDE = """## (j) Covered traffic to the outside

The same from a member to a client outside, while all of it is covered: *covered*: the kernel programs let it pass
beside the queue; *queue*: a member without kernel programs, whose packets all go through the queue, as in (d).
"""

OUTSIDE_WORDS = """A packet to the outside meets one program, which reads the member's addresses, the clock, P and C,
and the rules in front of the queue: a fixed price for each packet. A datagram that crosses from namespace to namespace
takes {datagram_us:.1f} µs in all, of which 3 % are {allowed_datagram_us:.2f} µs: less than the packet filter needs for
our chain of rules (`nft_do_chain` and what it calls), before the programs' share.
"""

SHORT_WORDS = """Where it is short of what is wanted, these functions take longer than without, in percent of the time
that a packet takes without (`perf record` on all that carries packets, a run with and one without).
"""

RELEASE = """## (k) Releases

Nanoseconds for each packet while {held_packets:,} are held (`netfilter/examples/release-bench.rs`). The first three are
the release queue alone, each packet with a stamp of its own; the last is real packets in the kernel's queue, from the
moment that C is told until the last of them has arrived at the client ({held_by_kernel:,} of them: Linux 6.18 takes no
more than 65,536 into one queue).
"""


def write_members(directory: Path, result: dict) -> list[str]:
    """Part (i)."""
    return _write(directory, result, "i-tags", "Between two members", MEMBERS, MEMBERS_WORDS)


def write_outside(directory: Path, result: dict) -> list[str]:
    """Part (j)."""
    return _write(directory, result, "j-covered", "Covered traffic to the outside", OUTSIDE, OUTSIDE_WORDS)


def _write(directory: Path, result: dict, name: str, title: str, before: str, after: str) -> list[str]:
    trips, rows = tagging.TRIPS, result["rows"]
    rates = {rate: words for rate, words in tagging.RATES.items() if all(rate in row["ratios"] for row in rows)}
    lines = [
        *before.format(**result).splitlines(),
        "",
        "| path | | " + " | ".join(f"{trip}, added µs" for trip in trips.values()) + " | programs, ns |",
        "|---|---|" + "---|" * (len(trips) + 1),
    ]
    timed = [row for row in rows if row["added_us"]]
    for row in timed:
        added = [_half(row["added_us"][trip]) for trip in trips]
        programs = ", ".join(f"`{program}` {ns:.0f}" for program, ns in row["program_ns"].items())
        lines.append(f"| {row['path']} | {row['guard']} | " + " | ".join(added) + f" | {programs} |")
    lines += [
        "",
        "| path | guests on | | " + " | ".join(f"{rate}, ratio | without" for rate in rates.values()) + " |",
        "|---|---|---|" + "---|---|" * len(rates),
    ]
    for row in rows:
        cells = [f"{_half(row['ratios'][rate])} | {_rate(rate, row['without'][rate])}" for rate in rates]
        lines.append(f"| {row['path']} | {row['cable']} | {row['guard']} | " + " | ".join(cells) + " |")
    groups = [(f"{row['path']}, {row['guard']}", [_bar(row["added_us"][trip]) for trip in trips]) for row in timed]
    svg = bar_chart(f"{title}: added to a round trip", "µs", list(trips.values()), groups)
    lines += ["", *after.format(**_each_packet(rows)).splitlines(), "", chart(directory, name, svg), ""]
    if result["profiles"]:
        lines += [*SHORT_WORDS.splitlines(), ""]
    for one in result["profiles"]:
        lines += _profile(one)
    return lines


def _profile(one: dict) -> list[str]:
    where = f"{tagging.RATES[one['rate']]}, {one['path']}, guests on {one['cable']}, {one['guard']}"
    rows = []
    for row in one["functions"]:
        percent, without = row["percent"], row["without"]
        rows.append(f"| {percent - without:+.1f} | {percent:.1f} | {without:.1f} | `{row['function']}` |")
    return details(where[0].upper() + where[1:], ["added, %", "with, %", "without, %", "function"], rows)


def _each_packet(rows: list[dict]) -> dict[str, float]:
    """What a packet takes where nothing is added, and what 3 % of that are."""
    packet_us = PACKET_BYTES * 8 / (max(row["without"]["gbit_per_s"] for row in rows) * 1e3)
    datagram_us = 1e6 / max(row["without"]["packets_per_s"] for row in rows)
    share = 1 - tagging.THROUGHPUT_LEVEL
    both: dict[str, float] = {}
    for row in rows:
        if row["added_us"]:
            both[row["path"]] = max(both.get(row["path"], 0), sum(row["program_ns"].values()) / 1e3)
    two_hosts_us = both.pop(tagging.PATHS["TwoHosts"])
    return {
        "one_host_us": max(both.values()),
        "two_hosts_us": two_hosts_us,
        "packet_kib": PACKET_BYTES / 1024,
        "packet_us": packet_us,
        "allowed_us": packet_us * share,
        "datagram_us": datagram_us,
        "allowed_datagram_us": datagram_us * share,
    }


def write_release(directory: Path, result: dict) -> list[str]:
    """Part (k)."""
    figures, rows = release.FIGURES, result["rows"]
    lines = [
        *RELEASE.format(**result).splitlines(),
        "",
        "| stamp | " + " | ".join(figures.values()) + " |",
        "|---|" + "---|" * len(figures),
    ]
    for row in rows:
        spreads = [row["figures"][figure] for figure in figures]
        cells = [f"{s['median']:,.0f} ({s['min']:,.0f} to {s['max']:,.0f})" for s in spreads]
        lines.append(f"| {row['stamp']} | " + " | ".join(cells) + " |")
    groups = [
        (row["stamp"], [(row["figures"][f]["median"], f"{row['figures'][f]['median']:,.0f} ns") for f in figures])
        for row in rows
    ]
    svg = bar_chart("A held packet", "ns", ["taken up", "all at once", "one by one", "at the client"], groups)
    return [*lines, "", chart(directory, "k-release", svg), ""]


def _half(half: dict) -> str:
    return f"{half['median']:.2f} ({half['low']:.2f} to {half['high']:.2f})"


def _rate(name: str, value: float) -> str:
    return f"{value:,.0f}/s" if name == "packets_per_s" else f"{value:.1f} Gb/s"


def _bar(added: dict) -> tuple[float, str]:
    # A bar has no direction: what is within the noise has none.
    return max(added["median"], 0.0), f"{added['median']:.1f} µs"
