"""Drills as tests: every scenario with a process guest, one with a VM, and drills that must find a promise broken."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from tidelock_testbed import drill
from tidelock_testbed.drilling import Drill, Entry, Knobs
from tidelock_testbed.hostdaemon import GROUP, ControlClient
from tidelock_testbed.process import wait_until
from tidelock_testbed.report import Report
from tidelock_testbed.run import Run
from tidelock_testbed.scenarios import SCENARIOS

ROWS_AFTER_CUT = 20

FIELDS = {
    *("scenario", "mode", "seed", "confirmed", "recovered", "lost", "recovered_unconfirmed", "rpo_ms", "rto_ms"),
    *("commits_per_s", "longest_hold_ms", "passed"),
}
"""What a report's entry has at least."""


def drilled(run: Run, kind: type[Drill], **knobs) -> Entry:
    this = kind(run, Knobs(scenario=kind.name, **{"guest": "process", "rtt_ms": 20, "hurry": True, **knobs}))
    this.execute()
    return this.entry


class CutThenDie(Drill):
    """Rows are confirmed by a primary that the backup cannot hear any more: they cannot survive."""

    name = "cut-then-die"

    def trouble(self) -> None:
        """Waits until some rows that were asked for after the cut are confirmed."""
        self.rig.net.wan.cut()
        cut_at = self.event("WAN cut")

        def told() -> bool:
            ledger = self.ledger.follow()
            return sum(ledger.sent[row] > cut_at for row in ledger.confirmed) >= ROWS_AFTER_CUT

        wait_until("rows are confirmed without the backup", told, 60, [self.clients.process])


class Unfaithful(CutThenDie):
    """A group that was switched to async while everyone believes that it is pipelined."""

    name = "unfaithful"

    def trouble(self) -> None:
        """Takes the gate away."""
        control = ControlClient(self.rig.daemon.control_socket)
        control.ask(command="mode", group=GROUP, mode="async")
        control.close()
        super().trouble()


@pytest.mark.parametrize(
    "scenario",
    [
        name
        for name, kind in SCENARIOS.items()
        if not (kind.several_guests or kind.has_watermark) and "process" in kind.guests
    ],
)
def test_a_pipelined_guest_keeps_its_promise(run, scenario):
    entry = drilled(run, SCENARIOS[scenario], seed=1)
    assert entry.passed, str(entry)


def test_a_sync_guest_keeps_its_promise(run):
    entry = drilled(run, Drill, mode="sync", seed=2)
    assert entry.passed, str(entry)
    assert entry.lost == 0


def test_async_loses_what_the_backup_could_not_hear_and_says_how_much(run):
    entry = drilled(run, CutThenDie, mode="async", seed=3)
    assert entry.passed, str(entry)
    assert entry.lost >= ROWS_AFTER_CUT
    assert entry.rpo_ms > 0
    assert entry.out_of_order == 0


def test_a_drill_finds_out_when_the_promise_is_broken(run):
    entry = drilled(run, Unfaithful, mode="pipelined", seed=4)
    assert entry.lost >= ROWS_AFTER_CUT
    assert not entry.passed
    assert [check["what"] for check in entry.checks if not check["passed"]][-1] == "no confirmed row is lost"


def test_a_vm_gets_a_dropped_table_back_with_every_row_that_was_told_before_and_the_report_has_it_all(run):
    this = SCENARIOS["oops"](run, Knobs(scenario="oops", rtt_ms=50, seed=5))
    this.execute()
    entry = this.entry
    assert entry.passed, str(entry)
    assert set(asdict(entry)) >= FIELDS
    phases = dict(entry.rto_ms)
    assert phases.pop("total") == pytest.approx(sum(phases.values()), abs=1)
    report = Report(run.directory / "drill-report.html", run.directory / "drill-report.json")
    report.add(this)
    assert json.loads(report.json.read_text()) == [asdict(entry)]
    page = report.html.read_text()
    assert page.count("<svg") == 2
    assert str(entry.confirmed) in page


def test_knobs_that_make_no_sense_are_refused(capsys):
    wrong = [
        (["--scenario", "no-such"], "grace"),
        (["--scenario", "grace", "--mode", "async"], "use one of sync, pipelined"),
        (["--scenario", "oops", "--guest", "process"], "use vm"),
        (["--tagging", "off"], "or three-tier or"),
        (["--watermark", "off"], "use SCENARIO=shards"),
        (["--scenario", "shards", "--mode", "sync"], "use one of async"),
        (["--runs", "0"], "1 or more"),
        (["--rtt-ms", "-1"], "0 to 2000"),
    ]
    for words, told in wrong:
        with pytest.raises(SystemExit) as ended:
            drill.main(words)
        assert ended.value.code == 2
        assert told in capsys.readouterr().err


def test_a_run_that_fails_is_a_broken_promise(run, monkeypatch, tmp_path):
    """Whatever goes wrong, the exit status is not 0, and the report says what it was."""

    class Fails(Drill):
        """Never gets anywhere."""

        name = "fails"

        def protect(self) -> None:
            raise RuntimeError("the ground opened")

    monkeypatch.setitem(SCENARIOS, "fails", Fails)
    assert drill.main(["--scenario", "fails", "--guest", "process", "--out", str(tmp_path)]) == 1
    entries = json.loads((tmp_path / "drill-report.json").read_text())
    assert [(entry["passed"], entry["error"]) for entry in entries] == [(False, "the ground opened")]
    page = (tmp_path / "drill-report.html").read_text()
    assert "the ground opened" in page
    (kept,) = (tmp_path / "drill-reports").iterdir()
    entry = json.loads(kept.read_text())
    assert entry == entries[0] and "-fails-pipelined-seed" in kept.name
    assert {"commit", "command line", "tidelockd", "tidelock-backup", "QEMU", "kernel"} <= entry["origin"].keys()
    assert any("runtime_dir" in text for text in entry["configuration"].values()), "the host's configuration"
    assert entry["origin"]["commit"] in page
