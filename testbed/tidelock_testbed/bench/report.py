"""The pages in `docs/bench/`: raw results as JSON, charts as SVG, one page for a reader."""

from __future__ import annotations

import json
from pathlib import Path

from ..svg import Series, line_chart
from . import figures, packets, past, storelogs, ways_back, words
from .charts import bar_chart
from .commits import MODES
from .page import chart, profile
from .targets import Verdict, command, verdicts

PARTS = {
    "a": "nbd",
    "b": "replication",
    "c": "commits",
    "d": "gate",
    "e": "memory",
    "f": "work",
    "g": "tiers",
    "h": "reads",
    "i": "tags",
    "j": "covered",
    "k": "release",
    "l": "reply",
    "m": "activity",
    "n": "history",
    "o": "comeback",
    "p": "outage",
    "q": "switchover",
    "r": "shards",
}
"""Each part's name in file names."""


def save(directory: Path, part: str, machine: dict, load: float, result: dict) -> None:
    """Keeps a part's raw results."""
    directory.mkdir(parents=True, exist_ok=True)
    whole = {
        "part": part,
        "command": command(part),
        "machine": machine,
        "load_before": round(load, 2),
        "result": result,
    }
    (directory / f"{part}-{PARTS[part]}.json").write_text(json.dumps(whole, indent=1) + "\n")


def load_all(directory: Path) -> dict[str, dict]:
    """Every part that was ever measured there, as `save` kept it."""
    paths = {part: directory / f"{part}-{name}.json" for part, name in PARTS.items()}
    return {part: json.loads(path.read_text()) for part, path in paths.items() if path.exists()}


def table(directory: Path) -> str:
    """The summary as Markdown, for the README."""
    lines = ["| | target | measured | |", "|---|---|---|---|"]
    results = {part: whole["result"] for part, whole in load_all(directory).items()}
    for verdict in verdicts(results):
        lines.append(f"| {verdict.part} | {verdict.target} | {verdict.measured} | {verdict.word} |")
    return "\n".join(lines) + "\n"


def summary(found: list[Verdict]) -> str:
    """The summary for a terminal."""
    return "\n".join(f"  ({v.part}) {v.word:8} {v.target}\n               {v.measured}" for v in found)


def write(directory: Path) -> None:
    """Writes the page and its charts from the raw results."""
    parts = load_all(directory)
    writers = {"a": _nbd, "b": _replication, "c": _commits, "d": _gate, "e": _memory}
    writers |= {"f": figures.write_work, "g": figures.write_tiers, "h": figures.write_reads}
    writers |= {
        "i": packets.write_members,
        "j": packets.write_outside,
        "k": packets.write_release,
        "l": figures.write_reply,
        "m": figures.write_activity,
        "n": past.write,
        "o": ways_back.write_comeback,
        "p": ways_back.write_outage,
        "q": ways_back.write_switchover,
        "r": storelogs.write,
    }
    page = [
        *words.PAGE.splitlines(),
        "",
        "| machine | |",
        "|---|---|",
        *_machines({part: whole["machine"] for part, whole in parts.items()}),
        "",
        "## Summary",
        "",
        table(directory),
        *words.ALONE.splitlines(),
        "",
    ]
    for part, whole in parts.items():
        page += writers[part](directory, whole["result"])
        page += [
            f"Command: `{whole['command']}`. Raw results: [{part}-{PARTS[part]}.json]({part}-{PARTS[part]}.json).",
            "",
        ]
    (directory / "README.md").write_text("\n".join(page).rstrip() + "\n")


def _machines(by_part: dict[str, dict]) -> list[str]:
    """Rows of what the parts were measured on: where that differs, with the parts."""
    rows = []
    for name in dict.fromkeys(name for machine in by_part.values() for name in machine):
        values: dict[str, list[str]] = {}
        for part, machine in by_part.items():
            values.setdefault(str(machine.get(name, "none")), []).append(part)
        told = [f"{value} ({', '.join(of)})" if len(values) > 1 else value for value, of in values.items()]
        rows.append(f"| {name} | {'; '.join(told)} |")
    return rows


def _spread(spread: dict, digits: int = 2) -> str:
    low, middle, high = (f"{spread[name]:,.{digits}f}" for name in ("min", "median", "max"))
    return f"{middle} ({low} to {high})"


def _nbd(directory: Path, result: dict) -> list[str]:
    lines = [*words.NBD.splitlines(), ""]
    for place, title in (("disk", "The image on the disk"), ("memory", "The image in memory")):
        servers = result[place]["servers"]
        rows = result[place]["workloads"]
        names = {server["key"]: server["name"] for server in servers}
        lines += [f"### {title}", ""]
        if place == "disk":
            lines += ["| server | how it uses the page cache |", "|---|---|"]
            lines += [f"| {server['name']} | {server['caching']} |" for server in servers]
            lines += [""]
        lines += ["| workload | ratio | best other | " + " | ".join(names.values()) + " |"]
        lines += ["|---|---|---|" + "---|" * len(names)]
        for row in rows:
            figures = [_iops(row["servers"][key]) for key in names]
            other = names[row["best_other"]]
            lines.append(f"| {row['workload']} | {_spread(row['ratio'])} | {other} | " + " | ".join(figures) + " |")
        groups = [
            (row["workload"], [(_share(row["servers"][key]), f"{_iops(row['servers'][key])}/s") for key in names])
            for row in rows
        ]
        svg = bar_chart(f"{title}: operations per second", "length: share of tidelock's", list(names.values()), groups)
        lines += ["", "Operations per second, medians.", "", chart(directory, f"a-{place}", svg), ""]
        short = [row for row in rows if "profile" in row]
        if short:
            lines += [*words.NBD_PROFILES.splitlines(), ""]
        for row in short:
            cores = row["profile"]["cores"]
            title = f"{row['workload']}: takes {cores['server']:.2f} cores, idle are {cores['idle']:.2f}"
            lines += profile(title, row["profile"]["top"])
    lines += _nbd_words(result)
    return lines


def _iops(server: dict) -> str:
    text = f"{server['iops']['median']:,.0f}"
    return text if server["compared"] else f"({text})"


def _share(server: dict) -> float:
    ours = server["ratio_of_ours"]["median"]
    return 1 / ours if ours else 0.0


def _nbd_words(result: dict) -> list[str]:
    """Which of qemu-nbd's two ways was the better one, and what several connections are bound by."""
    better = {"native": 0, "uring": 0}
    for place in result.values():
        for row in place["workloads"]:
            native, uring = (row["servers"][f"qemu-nbd-{aio}"]["iops"]["median"] for aio in better)
            better["native" if native >= uring else "uring"] += 1
    return [*words.QEMU_AIO.format(**better).splitlines(), ""]


def _replication(directory: Path, result: dict) -> list[str]:
    lines = [*words.REPLICATION.format(**result).splitlines(), ""]
    programs = [name for name in result["workloads"][0]["cores"] if name not in ("everything", "idle")]
    lines += ["| workload | ratio | without | with | added, median µs | cores: " + ", ".join(programs) + " | idle |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in result["workloads"]:
        cores = ", ".join(f"{row['cores'][name]:.2f}" for name in programs)
        lines.append(f"| {row['workload']} | {_with_and_without(row)} | {cores} | {row['cores']['idle']:.2f} |")
    short = [row for row in result["workloads"] if "half_load" in row]
    if short:
        lines += [
            *words.HALF_LOAD.splitlines(),
            "",
            "| workload | ratio | without | with | added, median µs | idle cores |",
            "|---|---|---|---|---|---|",
        ]
        for row in short:
            half = row["half_load"]
            lines.append(f"| {row['workload']} | {_with_and_without(half)} | {half['cores']['idle']:.2f} |")
        lines += ["", "What bounds them at full speed, from `perf record -g` on all programs but fio:", ""]
        for row in short:
            lines += profile(row["workload"], row.get("profile", []))
    lines += [
        *words.ONE_DISK.format(**result["one_disk"]).splitlines(),
        "",
        "| workload | ratio | without | with | added, median µs |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {row['workload']} | {_with_and_without(row)} |" for row in result["one_disk"]["workloads"]]
    lines += [""]
    groups = [
        (
            row["workload"],
            [
                (1.0, f"{row['plain']['iops']['median']:,.0f}/s"),
                (row["ratio"]["median"], f"{row['replicated']['iops']['median']:,.0f}/s"),
            ],
        )
        for row in result["workloads"]
    ]
    svg = bar_chart("Operations per second", "length: share of the path without", ["without", "replicated"], groups)
    return [*lines, "", chart(directory, "b-replication", svg), ""]


def _with_and_without(row: dict) -> str:
    return (
        f"{_spread(row['ratio'])} | {row['plain']['iops']['median']:,.0f}/s | "
        f"{row['replicated']['iops']['median']:,.0f}/s | {row['added_p50_us']:,.0f}"
    )


def _commits(directory: Path, result: dict) -> list[str]:
    lines = [*words.COMMITS.splitlines(), ""]
    for title, cells, name in (
        ("Each commit inserts a row", result["insert"], "insert"),
        ("Each commit locks the one table (PipeCloud 6.1, figure 9)", result["locked"], "locked"),
    ):
        if not cells:
            continue
        lines += [
            f"### {title}",
            "",
            "| RTT ms | clients | "
            + " | ".join(f"{m} /s" for m in MODES)
            + " | "
            + " | ".join(f"{m} ms" for m in MODES)
            + " | pipelined / sync |",
        ]
        lines += ["|---|---|" + "---|" * (2 * len(MODES) + 1)]
        for cell in sorted(cells, key=lambda cell: (cell["rtt_ms"], cell["clients"])):
            tps = [f"{cell['modes'][mode]['tps']['median']:,.0f}" for mode in MODES]
            reply = [f"{cell['modes'][mode]['p50_ms']['median']:,.1f}" for mode in MODES]
            lines.append(
                f"| {cell['rtt_ms']} | {cell['clients']} | "
                + " | ".join(tps + reply)
                + f" | ×{cell['pipelined_to_sync']['median']:,.1f} |"
            )
        lines += ["", "Commits per second and median reply times, medians over the turns.", ""]
        for rtt in sorted({cell["rtt_ms"] for cell in cells}):
            of_rtt = sorted((cell for cell in cells if cell["rtt_ms"] == rtt), key=lambda cell: cell["clients"])
            for figure, label in (("tps", "commits per second"), ("p50_ms", "median reply, ms")):
                series = [
                    Series(mode, [(cell["clients"], cell["modes"][mode][figure]["median"]) for cell in of_rtt])
                    for mode in MODES
                ]
                svg = line_chart(f"{title}, RTT {rtt} ms", "clients", label, series)
                lines.append(chart(directory, f"c-{name}-{figure.split('_')[0]}-{rtt}", svg))
        lines.append("")
    full = result["full"]
    if full:
        lines += [
            f"### With enough clients ({full['clients']}, RTT {full['rtt_ms']} ms)",
            "",
            "| mode | commits/s | median reply ms | 99 % ms |",
            "|---|---|---|---|",
            *(
                f"| {mode} | {_spread(of_mode['tps'], 0)} | {_spread(of_mode['p50_ms'], 1)} | "
                f"{of_mode['p99_ms']['median']:,.1f} |"
                for mode, of_mode in full["modes"].items()
            ),
            "",
            f"pipelined / async: {_spread(full['pipelined_to_async'])}.",
            "",
        ]
    return lines


def _gate(directory: Path, result: dict) -> list[str]:
    lines = [
        *words.GATE.format(**result).splitlines(),
        "",
        "| path | traffic | packets/s | of unprotected | added µs | TCP Gb/s | lost in the kernel's queue |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        added = "" if row["traffic"] == "unprotected" else _spread(row["added_us"], 1)
        lines.append(
            f"| {row['path']} | {row['traffic']} | {_spread(row['packets_per_s'], 0)} | "
            f"{row['packets_ratio']['median']:.2f} | {added} | {_spread(row['tcp_gbit_per_s'], 1)} | "
            f"{row['dropped_by_kernel']:,} |"
        )
    names = ["unprotected", "covered", "uncovered"]
    groups = [
        (
            path,
            [
                (row["packets_per_s"]["median"], f"{row['packets_per_s']['median']:,.0f}/s")
                for row in result["rows"]
                if row["path"] == path
            ],
        )
        for path in ("routed", "bridged")
    ]
    svg = bar_chart("Packets per second through the gate", "64-byte datagrams", names, groups)
    return [*lines, "", chart(directory, "d-gate", svg), ""]


def _memory(directory: Path, result: dict) -> list[str]:
    lines = [
        *words.MEMORY.format(**result).splitlines(),
        "",
        "| load | process | at rest MiB | most MiB | after MiB | backlog's limit MiB | written MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    charts = []
    for number, (name, load) in enumerate(result["loads"].items()):
        for process in load["max_mib"]:
            lines.append(
                f"| {name} | {process} | {load['at_rest_mib'][process]:,.0f} | {load['max_mib'][process]:,.0f} | "
                f"{load['after_mib'][process]:,.0f} | {load['backlog_limit_mib']:,.0f} | {load['written_mib']:,} |"
            )
        series = [Series(process, [tuple(p) for p in points]) for process, points in load["rss_mib"].items()]
        series.append(Series("backlog", [tuple(p) for p in load["backlog_mib"]]))
        svg = line_chart(f"Memory under {name}", "seconds", "MiB", series)
        charts.append(chart(directory, f"e-memory-{number + 1}", svg))
    return [*lines, "", *charts, ""]
