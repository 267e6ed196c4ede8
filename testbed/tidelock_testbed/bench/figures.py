"""The pages of (f), (g) and (h): PipeCloud's figures of applications with several tiers; and of (l), one reply."""

from __future__ import annotations

from pathlib import Path

from ..svg import Series, line_chart
from . import reads, reply, tiers, work
from .application import LAYOUTS
from .page import chart
from .timeline import PHASES

APPLICATIONS = """Each tier is a web service of Python's own and a PostgreSQL 15 with `fsync = on`, in a guest's network
namespace on this machine's kernel, its files on ext4 on the protected disk; clients ask the front tier over HTTP. All
tiers, both sites and the clients share the cores of this one machine. On one host packets from tier to tier carry no
tag: what a tier depends on is handed over in the kernel's memory. On two hosts the back tier is on the other one, and
packets carry a tag where they depend on what is not committed; how many do is told for each reply of *joint*.
"""

WORK = f"""## (f) Work that is hidden behind the round trip

As PipeCloud's figure 13, at {{rtt_ms}} ms RTT: the back tier inserts a row, then the front tier works on the answer.
*joint* holds packets where they leave the group, *naive* where they leave each member (`boundary = "member"`), so that
the front begins its work only when the backup has the row. One client; mean reply times.

{APPLICATIONS}"""

TIERS = """## (g) One, two and three tiers protected

As PipeCloud's figure 14, at {rtt_ms} ms RTT: a request inserts a row in each of three tiers, of which the innermost
one, two or all three are protected; the others are members without a protected disk. One client; mean reply times.
*added* is the difference to `async` in the same round. On two hosts the middle tier is on the other one, so that every
packet from tier to tier crosses the LAN; how many carry a tag is told for each reply of `pipelined`, as in (f).
"""

READS = """## (h) Reads beside writes

As PipeCloud's figure 12, at {rtt_ms} ms RTT: one guest, {reads_per_s} static pages a second, and rows at a rate that
rises. A packet cannot be told from one that depends on a write, so a page waits for the writes before it.
"""

ACTIVITY = """## (m) The activity log

fio on a protected disk, with the [activity log](../activity-log.md) on and off, and with a map that holds a quarter of
the disk's extents, so that most writes over the whole disk wait for it. The same sites and image in turns; medians."""
REPLY = """## (l) A reply at low load

The databases of (c), and one client: its next commit follows the last one's reply. Below, what a reply takes beyond the
round trip, by its packets seen at the client's and the guest's interface and at both ends of the WAN
(`bench/timeline.py`), in a turn of its own: whoever looks at packets takes time, too. The backup's journal is on the
disk that holds the guest's image, and flushes while the guest's own flush goes on. Every step after a wait of an RTT
finds the machine's cores asleep: a thread is then woken 0.1 to 0.2 ms late here, and at once where the cores are busy.
"""


def write_work(directory: Path, result: dict) -> list[str]:
    """Part (f)."""
    names = list(work.VARIANTS)
    heads = ["tiers on", "work ms", *(f"{name} ms" for name in names), "packets with a tag"]
    lines = [*WORK.format(**result).splitlines(), "", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for point in result["points"]:
        cells = [point["layout"], f"{point['work_ms']:g}", *(_spread(point["mean_ms"][name]) for name in names)]
        lines.append("| " + " | ".join([*cells, _spread(point["tagged"])]) + " |")
    return [*lines, "", *_charts(directory, "f-work", result["rtt_ms"], result["points"], "work_ms"), ""]


def write_tiers(directory: Path, result: dict) -> list[str]:
    """Part (g)."""
    modes = tiers.MODES
    added = [mode for mode in modes if mode != "async"]
    heads = ["tiers on", "protected", *(f"{mode} ms" for mode in modes), *(f"{mode}, added ms" for mode in added)]
    heads.append("packets with a tag")
    lines = [*TIERS.format(**result).splitlines(), "", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in result["rows"]:
        cells = [row["layout"], str(row["protected"]), *(_spread(row["mean_ms"][mode]) for mode in modes)]
        cells += [*(_spread(row["added_ms"][mode]) for mode in added), _spread(row["tagged"])]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, "", *_charts(directory, "g-tiers", result["rtt_ms"], result["rows"], "protected"), ""]


LABELS = {"work_ms": "work in the front tier, ms", "protected": "tiers protected"}


def _charts(directory: Path, name: str, rtt_ms: float, rows: list[dict], x: str) -> list[str]:
    """Reply times over something, one chart for each layout."""
    made = []
    for layout in LAYOUTS:
        its = [row for row in rows if row["layout"] == layout]
        series = [Series(n, [(row[x], row["mean_ms"][n]["median"]) for row in its]) for n in its[0]["mean_ms"]]
        svg = line_chart(f"Reply time, RTT {rtt_ms} ms, tiers on {layout}", LABELS[x], "mean reply, ms", series)
        made.append(chart(directory, f"{name}-{layout.replace(' ', '-')}", svg))
    return made


def write_reads(directory: Path, result: dict) -> list[str]:
    """Part (h)."""
    modes, points = reads.MODES, result["points"]
    heads = [f"{mode}: mean, deviation ms; writes/s done" for mode in modes]
    lines = [*READS.format(**result).splitlines(), "", "| writes/s asked | " + " | ".join(heads) + " |"]
    lines.append("|---|" + "---|" * len(heads))
    for point in points:
        cells = []
        for mode in modes:
            mean, deviation, done = (point["modes"][mode][k] for k in ("mean_ms", "deviation_ms", "writes_per_s"))
            cells.append(f"{_spread(mean)}, {deviation['median']:.1f}; {done['median']:.0f}")
        lines.append(f"| {point['write_rate']} | " + " | ".join(cells) + " |")
    charts = []
    for key, label in (("mean_ms", "mean reply of a read, ms"), ("deviation_ms", "its standard deviation, ms")):
        series = [Series(m, [(p["write_rate"], p["modes"][m][key]["median"]) for p in points]) for m in modes]
        svg = line_chart(f"Reads, RTT {result['rtt_ms']} ms", "writes each second", label, series)
        charts.append(chart(directory, f"h-reads-{key.partition('_')[0]}", svg))
    return [*lines, "", *charts, ""]


def write_reply(_directory: Path, result: dict) -> list[str]:
    """Part (l)."""
    rows = sorted(result["rows"], key=lambda row: row["rtt_ms"])
    heads = " | ".join(f"{mode} ms" for mode in reply.MODES)
    lines = [*REPLY.splitlines(), "", f"| RTT ms | {heads} |", "|---|" + "---|" * len(reply.MODES)]
    lines += [
        f"| {row['rtt_ms']} | " + " | ".join(_times(row["p50_ms"][m]) for m in reply.MODES) + " |" for row in rows
    ]
    lines += [
        "",
        "| µs | " + " | ".join(f"RTT {row['rtt_ms']} ms" for row in rows) + " |",
        "|---|" + "---|" * len(rows),
    ]
    for name, what in PHASES.items():
        lines.append(f"| {what} | " + " | ".join(f"{row['timeline']['phases_us'][name]:,.0f}" for row in rows) + " |")
    whole = " | ".join(f"{row['timeline']['over_rtt_us']:,.0f}" for row in rows)
    return [*lines, f"| **together** | {whole} |", "", "Medians.", ""]


def write_activity(_directory: Path, result: dict) -> list[str]:
    """Part (m)."""
    lines = [*ACTIVITY.splitlines(), "", "| write in | workload | off, IOPS | on, IOPS | on / off | a quarter / off |"]
    lines.append("|---|---|---|---|---|---|")
    for row in result["rows"]:
        off, on = (f"{row['iops'][setup]['median']:,.0f}" for setup in ("off", "on"))
        ratios = " | ".join(f"×{row[name]['median']:.2f}" for name in ("ratio", "ratio_small"))
        lines.append(f"| {row['share']} | {row['workload']} | {off} | {on} | {ratios} |")
    return [*lines, ""]


def _times(spread: dict) -> str:
    return f"{spread['median']:.2f} ({spread['min']:.2f} to {spread['max']:.2f})"


def _spread(spread: dict) -> str:
    return f"{spread['median']:.1f} ({spread['min']:.1f} to {spread['max']:.1f})"
