"""Drills of applications with process guests: every scenario, and drills that must find a promise broken."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from app_drills import drilled

from tidelock_testbed.appdrill import HELD_S, AppDrill, OneHostDies, OneLinkCut, ThreeTier, TwoHosts, TwoWriters
from tidelock_testbed.applications import TWO_WRITERS
from tidelock_testbed.drilling import Entry
from tidelock_testbed.fleet import Fleet, Shape
from tidelock_testbed.hostdaemon import Protection
from tidelock_testbed.paths import BIN
from tidelock_testbed.process import Process, run_command, wait_until
from tidelock_testbed.report import Report, summary


class FrontApart(TwoHosts):
    """No member of the front's host has a disk: it hears C for its gate alone, and what it says goes by that."""

    hosts = {"front": 1}


ROLLING = 4
"""A seed of which the disaster is a rolling one, also with tags."""


def check_promise(entry: Entry, kind: type[AppDrill]) -> None:
    """Checks that it passed, and had something to judge in each database."""
    assert entry.passed, str(entry)
    assert set(entry.tiers) == set(entry.cut) == set(kind.application.databases)
    assert entry.told_by_pages > 0
    assert all(tier["recovered"] >= entry.confirmed for tier in entry.tiers.values())


@pytest.mark.parametrize("kind", [TwoWriters, OneHostDies, OneLinkCut], ids=lambda kind: kind.name)
def test_an_application_keeps_its_promise(run, kind):
    check_promise(drilled(run, kind, rtt_ms=20, seed=1).entry, kind)


def test_with_times_for_tags_an_application_keeps_its_promise(run):
    entry = drilled(run, OneHostDies, rtt_ms=20, seed=1, form="hlc").entry
    assert entry.passed, str(entry)


def test_vms_keep_it_see_no_tag_and_are_all_booted_by_recover(run):
    """On two hosts, so tags do cross the taps; the guests watch what they receive, and none may ever see one."""
    this = drilled(run, TwoHosts, guest="vm", rtt_ms=20, seed=1)
    check_promise(this.entry, TwoHosts)
    machines = {guest.process for guest in this.recovery.guests.values()}
    assert len(machines) == 1, "one command brought all of them up"
    # What these two sent each other got tags, which were taken out in front of the other's tap. The third is on the
    # front's own host.
    for name in ("a", "front"):
        tagging = this.sampler.members[name]["tagging"]
        assert tagging["tagged_packets"] > 0 and tagging["merged_packets"] > 0, (name, tagging)
    for name, guest in this.rig.guests.items():
        assert "capture" in guest.phases and guest.options_seen == [], (name, guest.options_seen)


@pytest.mark.parametrize("boundary", ["group", "member"])
def test_where_kernel_programs_may_not_be_loaded_a_group_that_needs_them_is_refused(run, boundary):
    """Root that lacks just that right: the daemon says which, and ends, before it serves a disk or shuts a gate."""
    guests = {place.name: 0 for place in TWO_WRITERS.places}
    fleet = Fleet(run, "process", Shape(TWO_WRITERS, guests, (20,), boundary), 1, Protection(lease_s=2, grace_s=3))
    fleet.backup.start()
    fleet.plug_in()
    daemon = fleet.daemons[0]
    without_bpf = ["setpriv", "--bounding-set=-bpf,-sys_admin,-perfmon"]
    argv = [*without_bpf, BIN / "tidelockd", "--config", daemon.config]
    process = Process(run, "tidelockd", argv, daemon.netns)
    if boundary == "member":
        wait_until("it runs without them", lambda: daemon.control_socket.exists() and daemon.group(), 30, [process])
        return
    assert process.wait(30) == 1, process.tail()
    wanted = "not allowed to load kernel programs: run tidelockd as root or with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON"
    assert wanted in process.tail() and f'group "{fleet.name}"' in process.tail(), process.tail()
    rules = run_command(["nft", "list", "ruleset"], "list the rules", daemon.netns)
    assert "TL-" not in rules and "tidelock" not in rules, rules
    assert not list(daemon.runtime.rglob("*.sock"))


@pytest.mark.parametrize("boundary", ["member", "apart"])
def test_other_boundaries_keep_it_too(run, boundary):
    entry = drilled(run, TwoHosts, rtt_ms=20, seed=1, boundary=boundary).entry
    assert entry.passed, str(entry)


@pytest.mark.parametrize("kind", [ThreeTier, TwoHosts], ids=lambda kind: kind.name)
def test_with_tags_the_promise_survives_the_disaster_that_breaks_it_without(run, kind):
    entry = drilled(run, kind, rtt_ms=100, seed=ROLLING).entry
    assert entry.passed, str(entry)
    assert entry.disaster == "rolling"
    # Somebody waited for an answer all the time, and there was none.
    assert entry.longest_hold_ms > HELD_S * 1e3 / 2, entry
    assert any("clients were told of 0 rows that they had asked for since" in note for note in entry.notes), entry


@pytest.mark.parametrize("form", ["vector", "hlc"])
def test_a_host_without_a_disk_hears_what_is_committed(run, form):
    entry = drilled(run, FrontApart, rtt_ms=20, seed=ROLLING, form=form).entry
    assert entry.passed, str(entry)
    assert entry.disaster == "rolling" and entry.confirmed > 0
    assert any("clients were told of 0 rows that they had asked for since" in note for note in entry.notes), entry


@pytest.mark.parametrize("kind", [ThreeTier, TwoHosts], ids=lambda kind: kind.name)
def test_without_tags_a_drill_sees_the_promise_break(run, kind):
    """The same drill and the same disaster: so it is tags that keep the promise, and the drill would notice."""
    entry = drilled(run, kind, rtt_ms=100, seed=ROLLING, tagging=False).entry
    assert entry.violated and not entry.passed
    assert entry.disaster == "rolling"
    assert entry.lost > 0
    broken = {check["what"] for check in entry.checks if not check["passed"]}
    assert "no confirmed row is missing in any database" in broken


def test_the_report_has_every_tier_and_the_cut(run):
    this = drilled(run, ThreeTier, rtt_ms=20, seed=2)
    check_promise(this.entry, ThreeTier)
    report = Report(run.directory / "drill-report.html", run.directory / "drill-report.json")
    report.add(this)
    assert json.loads(report.json.read_text()) == [asdict(this.entry)]
    # Views of each database, and answers.
    assert report.html.read_text().count("<svg") == len(this.entry.tiers) + 1
    for text in (report.html.read_text(), summary(this.entry)):
        for name, count in this.entry.cut.items():
            assert f"{name} {count}" in text
            assert f"{name}: confirmed, recovered, lost" in text


def test_a_drill_finds_rows_that_dangle_and_rows_that_are_lost(run):
    """Each guest in a group of its own, nothing held, and links that differ: the databases end at different moments."""
    entry = drilled(run, TwoHosts, mode="async", boundary="apart", rtt_ms=50, seed=3).entry
    assert entry.lost > 0
    assert entry.dangling > 0
    assert entry.told_by_pages_lost > 0
    assert len(entry.dangling_rows) > 0
    assert entry.violated and not entry.passed
    assert [check["what"] for check in entry.checks if not check["passed"]] == [
        "no row depends on a row that is not there"
    ]
