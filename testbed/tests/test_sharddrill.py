"""The drill of a sharded store: each part killed, each kind of disaster; and without a watermark chains must break."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from tidelock_testbed.drilling import Knobs
from tidelock_testbed.report import Report, summary
from tidelock_testbed.run import Run
from tidelock_testbed.sharddrill import DISASTERS, PARTS, ShardDrill


def drilled(run: Run, part: str, disaster: str, **knobs) -> ShardDrill:
    """The whole drill, with what the seed would draw."""
    kind = ShardDrill
    this = kind(run, Knobs(scenario=kind.name, mode="async", guest="process", rtt_ms=kind.default_rtt_ms, **knobs))
    this.part, this.entry.disaster = part, disaster
    this.execute()
    return this


@pytest.mark.parametrize("part", PARTS)
def test_what_is_left_of_a_store_is_a_prefix_at_one_cut(run, part):
    seed = PARTS.index(part)
    this = drilled(run, part, DISASTERS[seed % len(DISASTERS)], seed=seed)
    entry = this.entry
    assert entry.passed, str(entry)
    assert entry.recovered > entry.lost and this.found.chains > 1
    assert all(of["recovered"] for of in entry.store["shards"].values())
    report = Report(run.directory / "drill-report.html", run.directory / "drill-report.json")
    report.add(this)
    assert json.loads(report.json.read_text()) == [json.loads(json.dumps(asdict(entry)))]
    assert entry.store["killed"] in report.html.read_text()
    assert entry.store["cut"] in summary(entry)


def test_without_a_watermark_the_drill_finds_broken_chains(run):
    this = drilled(run, "primary", "cut", seed=7, watermark=False)
    assert this.entry.violated and not this.entry.passed, str(this.entry)
    assert this.entry.dangling > 0 and not this.found.strange
