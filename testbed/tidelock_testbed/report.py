"""What drills found, as text, JSON and HTML."""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path

from .drilling import Drill, Entry
from .durability import write_rows

PHASES = {
    "decide": "decide (0: the drill knew)",
    "recover": "recover: epoch raised, disks served",
    "boot": "boot, up to the guest's kernel",
    "disks": "the guest has checked its disks",
    "database": "the database has recovered",
    "first_reply": "a client gets its first reply",
    "total": "total",
}

STYLE = """
body { font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 62em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } td, th { border-bottom: 1px solid #ddd; padding: .25em .8em }
td { text-align: right } td.text, th { text-align: left }
.good { color: #2b8a3e } .bad { color: #c00; font-weight: bold }
svg { display: block; margin: 1.5em 0; max-width: 100% } pre { background: #f6f6f6; padding: 1em; overflow: auto }
.small { color: #555; font-size: 13px }
"""


@dataclass
class Report:
    """Written anew after each run, so that a run that is stopped does not take the earlier ones with it.

    Each run also has files of its own in `kept`, which no later drill removes: its entry, and a table of its rows.
    """

    html: Path
    json: Path
    entries: list[Entry] = field(default_factory=list)
    sections: list[str] = field(default_factory=list)

    @property
    def kept(self) -> Path:
        """The directory of the runs' own files."""
        return self.json.parent / "drill-reports"

    def add(self, drill: Drill) -> None:
        """Adds a run and writes both files."""
        self.entries.append(drill.entry)
        self.sections.append(_section(len(self.entries), drill))
        self.html.parent.mkdir(exist_ok=True)
        self.kept.mkdir(parents=True, exist_ok=True)
        entry = drill.entry
        name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{entry.scenario}-{entry.mode}-seed{entry.seed}"
        (self.kept / f"{name}.json").write_text(json.dumps(asdict(entry), indent=2) + "\n")
        if drill.durability:
            write_rows(self.kept / f"{name}-rows.csv", drill.durability)
        self.json.write_text(json.dumps([asdict(entry) for entry in self.entries], indent=2) + "\n")
        self.html.write_text(self._page())

    def _page(self) -> str:
        heads = ["run", "scenario", "mode", "guest", "seed", "confirmed", "recovered", "lost", "RPO", "RTO"]
        heads += ["commits/s", "longest hold", "outcome"]
        rows = "".join(_row(number, entry) for number, entry in enumerate(self.entries, 1))
        made = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        machine = f"Linux {platform.release()}, {os.cpu_count()} processors"
        return (
            f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>Tidelock drill</title>"
            f"<style>{STYLE}</style></head><body>\n<h1>Tidelock drill</h1>\n<p class='small'>{made}, {machine}</p>\n"
            f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>\n{rows}</table>\n"
            + "\n".join(self.sections)
            + "\n</body></html>\n"
        )


def _row(number: int, entry: Entry) -> str:
    cells = [
        entry.confirmed,
        entry.recovered,
        f"<span class='{'bad' if entry.lost and entry.mode != 'async' else ''}'>{entry.lost}</span>",
        _ms(entry.rpo_ms),
        _ms(entry.rto_ms["total"]) if entry.rto_ms else "none",
        f"{entry.commits_per_s:g}",
        _ms(entry.longest_hold_ms),
        _marked(entry),
    ]
    words = [f"<a href='#run{number}'>{number}</a>", escape(entry.scenario), entry.mode, entry.guest, entry.seed]
    return (
        "<tr>"
        + "".join(f"<td class='text'>{word}</td>" for word in words)
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + "</tr>\n"
    )


def _outcome(entry: Entry) -> str:
    """PASS, FAIL (the promise was seen to break) or ERROR (the run ended before it could be judged)."""
    if entry.passed:
        return "PASS"
    return "FAIL" if entry.violated else "ERROR"


def _verdict(entry: Entry) -> str:
    """The outcome with the losses beside it: a run in `async` may pass and have lost rows that clients were told of."""
    lost = f", {entry.lost} rows lost" if entry.passed and entry.lost else ""
    return _outcome(entry) + lost


def _marked(entry: Entry) -> str:
    clean = entry.passed and not entry.lost
    return f"<span class='{'good' if clean else '' if entry.passed else 'bad'}'>{_verdict(entry)}</span>"


def _ms(value: float) -> str:
    return f"{value / 1e3:.2f} s" if value >= 1000 else f"{value:.0f} ms"


def _figures(entry: Entry) -> list[tuple[str, str]]:
    """What a run found, in the order in which a reader wants to know it."""
    if entry.store is not None:
        return _store_figures(entry, entry.store)
    figures = [
        ("confirmed rows", f"{entry.confirmed}"),
        ("recovered rows", f"{entry.recovered}"),
        ("lost rows (confirmed, not recovered)", f"{entry.lost}"),
        ("recovered rows that no client was told of", f"{entry.recovered_unconfirmed}"),
        *(
            [("rows given up: confirmed after the point in time", f"{entry.given_up}")]
            if entry.given_up is not None
            else []
        ),
        *_tier_figures(entry),
        ("RPO: age of the oldest confirmed row that was lost", _ms(entry.rpo_ms)),
    ]
    if entry.rto_ms:
        figures += [(f"RTO, {name}", _ms(entry.rto_ms[key])) for key, name in PHASES.items()]
    figures += _durability_figures(entry)
    figures.append(("commits per second before the disaster", f"{entry.commits_per_s:g}"))
    if entry.reply_ms:
        times = ", ".join(f"{name} {value:.0f}" for name, value in entry.reply_ms.items())
        figures.append(("reply times, ms", times))
    figures += [
        ("longest hold", _ms(entry.longest_hold_ms)),
        ("packets held at once, most", f"{entry.held_packets_max}"),
        ("lag, most", f"{entry.lag_writes_max} writes, {_ms(entry.lag_ms_max)}"),
    ]
    if entry.copy_s:
        figures.append(("initial copy, while the guest booted", f"{entry.copy_s:g} s"))
    if entry.disaster:
        figures.append(("disaster (rolling: ways to the backup were gone first)", entry.disaster))
    return figures


def _store_figures(entry: Entry, store: dict) -> list[tuple[str, str]]:
    """Findings of a run with a sharded store, in the same order."""
    figures = [
        ("chains, and rows without the one before", f"{store.get('chains', 0)}, {entry.dangling}"),
        ("confirmed rows", f"{entry.confirmed}"),
        ("recovered rows", f"{entry.recovered}"),
        ("lost rows (confirmed, not recovered)", f"{entry.lost}"),
        ("recovered rows that no client was told of", f"{entry.recovered_unconfirmed}"),
        ("loss window: first lost confirmation to disaster", f"{entry.rpo_ms:.1f} ms"),
    ]
    if "cut" in store:
        figures.append(("the cut, before the disaster", f"{store['cut_before_disaster_ms']:.1f} ms"))
        figures.append(("recover, until all shards were promoted", _ms(store["recover_ms"])))
    for name, shard in store.get("shards", {}).items():
        counts = [shard.get(which, 0) for which in ("confirmed", "recovered", "lost", "left_out")]
        figures.append((f"{name}: confirmed, recovered, lost, commits left out", ", ".join(map(str, counts))))
        times = f"{shard['ready_ms']} and {shard['promoted_ms']} ms"
        figures.append((f"{name}: log up to {shard['apply_to']}; ready, promoted", times))
    if store.get("lag_ms"):
        times = ", ".join(f"{name} {value:.0f}" for name, value in store["lag_ms"].items())
        figures.append(("age of the watermark under load, ms", times))
    if "back_s" in store:
        figures.append((f"killed: {store['killed']}; lag was back after", f"{store['back_s']:.1f} s"))
    figures.append(("commits per second before the disaster", f"{entry.commits_per_s:g}"))
    if entry.reply_ms:
        times = ", ".join(f"{name} {value:.1f}" for name, value in entry.reply_ms.items())
        figures.append(("reply times, ms", times))
    figures.append(("disaster (cut, slow: the link of one host was that first)", entry.disaster))
    return figures


def _durability_figures(entry: Entry) -> list[tuple[str, str]]:
    """When clients were told of rows, after the backup had them."""
    figures = []
    for name, found in entry.durability.items():
        counts = f"{found['told']}, {found['measured']}, {found['told_first']}"
        figures.append((f"{name}: rows told, measured, told before durable", counts))
        if "told_after_ms" in found:
            times = ", ".join(f"{which} {value:.0f}" for which, value in found["told_after_ms"].items())
            figures.append((f"{name}: told after the backup had the row, ms", times))
    return figures


def _unmeasured(entry: Entry) -> list[str]:
    """Rows that clients were told of and for which nothing was measured."""
    notes = []
    for name, found in entry.durability.items():
        for reason, count in found["not_measured"].items():
            notes.append(f"{name}: {count} rows that clients were told of could not be measured: {reason}")
        if count := found["in_one_sample"]:
            text = "it is not known which was first"
            notes.append(f"{name}: {count} rows were told and became durable between two samples: {text}")
    return notes


def _tier_figures(entry: Entry) -> list[tuple[str, str]]:
    """With several databases, what each of them has, and what they say of each other."""
    if entry.tiers is None:
        return []
    figures = [
        (f"{name}: confirmed, recovered, lost", f"{tier['confirmed']}, {tier['recovered']}, {tier['lost']}")
        for name, tier in entry.tiers.items()
    ]
    figures.append(("rows that depend on a row that is not there", f"{entry.dangling}"))
    told = f"{entry.told_by_pages}, {entry.told_by_pages_lost}"
    figures.append(("rows that pages told readers of, and of these lost", told))
    return figures


def _cut(entry: Entry) -> list[str]:
    """The cut, what it leaves out, and the first rows that dangle."""
    if entry.store is not None:
        cut = [f"recovered at the cut {entry.store['cut']}"] if "cut" in entry.store else []
        return cut + [f"broken: {text}" for text in entry.dangling_rows]
    if entry.cut is None:
        return []
    cut = ", ".join(f"{name} {count}" for name, count in entry.cut.items())
    lines = [f"recovered at the cut {cut} (each writer's count of writes)"]
    return lines + entry.left_out + [f"dangling: {text}" for text in entry.dangling_rows]


def _section(number: int, drill: Drill) -> str:
    entry = drill.entry
    checks = "".join(
        f"<li class='{'good' if check['passed'] else 'bad'}'>{'PASS' if check['passed'] else 'FAIL'}: "
        f"{escape(check['what'])}</li>"
        for check in entry.checks
    )
    figures = "".join(f"<tr><td class='text'>{name}</td><td>{value}</td></tr>" for name, value in _figures(entry))
    states = ", ".join(f"{name} at {at - drill.disaster_at:.1f} s" for at, name in drill.states())
    return (
        f"<h2 id='run{number}'>Run {number}: {escape(entry.scenario)}, {entry.mode}, seed {entry.seed}</h2>\n"
        f"<p>{escape(drill.about)}. {entry.rtt_ms:g} ms round trip ({entry.wan}), guest: {entry.guest}.</p>\n"
        f"<p>The promise: {escape(entry.promise)}. {_marked(entry)}</p>\n<ul>{checks}</ul>\n"
        + (f"<pre>{escape(entry.error)}</pre>\n" if entry.error else "")
        + "".join(f"<p>{escape(note)}</p>\n" for note in entry.notes + _cut(entry) + _unmeasured(entry))
        + f"<table>{figures}</table>\n"
        + "\n".join(drill.charts)
        + _origin(entry)
        + f"<p class='small'>{_method(entry)}"
        + (f" States of the group, relative to the disaster: {escape(states)}." if states else "")
        + "</p>"
    )


def _origin(entry: Entry) -> str:
    """Everything that somebody needs to repeat the run, and to know that the files beside the report belong to it."""
    lines = [f"<p class='small'>{escape(name)}: {escape(value)}</p>" for name, value in entry.origin.items()]
    files = [
        f"<details><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>"
        for name, text in entry.configuration.items()
    ]
    return "\n".join([*lines, *files]) + "\n"


METHOD = (
    "Rows at the client are those of the clients' ledger. Rows at the primary are what the database says on the "
    "guest's console, where nothing is held, about every 50 ms; in between they are drawn in proportion to the "
    "daemon's count of writes (P). Rows at the secondary are measured one by one. The backup's journal has every "
    "write of the guest, with its number. A row is durable with the first write after which the database would find "
    "it if the guest crashed then: for PostgreSQL the write that completes its commit record and the log before that, "
    "for the row store the write that completes its block and the blocks before that. The backup server is asked "
    "every few milliseconds for its cut, which is what a recovery would take. A row is shown as durable from the "
    "first answer on whose cut has its write: late by one interval between samples at most. A client counts as told "
    "before the row was durable if the server was asked after that and answered with a cut that did not have the "
    "row's write."
)
METHOD_SEVERAL = (
    "A row is recovered if every database has it, and lost if a client was told of it and one database lacks it. "
    + METHOD
)


METHOD_STORE = (
    "Clients note each row in a ledger before they ask for it, and again when its server has answered. Rows of a chain "
    "are on one shard after the other, each asked for when the one before was answered. After the recovery every row "
    "of every promoted server is read and compared with the ledger. The loss window begins with the first answer to a "
    "row that is not there. The backup is asked every 20 ms for its watermark, whose age is the time since its stamp: "
    "all clocks are one. The cut and the commits that are left out are what the recovery says."
)


def _method(entry: Entry) -> str:
    if entry.store is not None:
        return METHOD_STORE
    return METHOD_SEVERAL if entry.tiers else METHOD


def summary(entry: Entry) -> str:
    """A run, as text; the last line is the one to read."""
    if entry.error and not entry.violated:
        last = f"ERROR: the run ended before it could be judged: {entry.error.splitlines()[0]}"
        return "\n".join(["", *_checks(entry), f"  {last}", ""])
    lines = [f"  {name:<58}{value:>14}" for name, value in _figures(entry)]
    lines += _checks(entry)
    lines += [f"  note    {note}" for note in entry.notes + _cut(entry) + _unmeasured(entry)]
    return "\n".join(["", *lines, f"  {_verdict(entry)}. The promise: {entry.promise}", ""])


def _checks(entry: Entry) -> list[str]:
    return [f"  {'PASS' if check['passed'] else 'FAIL'}    {check['what']}" for check in entry.checks]


def overview(entries: list[Entry]) -> str:
    """A line for each of several runs."""
    heads = f"{'confirmed':>9}  {'lost':>5}  {'dangling':>8}  {'RTO':>8}  {'disaster':<8}"
    lines = [f"  {'run':>3}  {'seed':>7}  {heads}  outcome"]
    for number, entry in enumerate(entries, 1):
        rto = _ms(entry.rto_ms["total"]) if entry.rto_ms else "none"
        figures = f"{entry.confirmed:>9}  {entry.lost:>5}  {entry.dangling:>8}  {rto:>8}  {entry.disaster:<8}"
        lines.append(f"  {number:>3}  {entry.seed:>7}  {figures}  {_outcome(entry)}")
    return "\n".join([*lines, ""])
