"""Charts and views: what a report shows is what was measured."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from tidelock_testbed.drilling import Entry
from tidelock_testbed.ledger import Ledger
from tidelock_testbed.report import overview, summary
from tidelock_testbed.svg import Marker, Series, line_chart
from tidelock_testbed.views import Views, answers_chart


def test_a_chart_is_well_formed_and_has_every_series():
    text = line_chart(
        "A & B", "time", "rows", [Series("x < y", [(0, 0), (1, 10)]), Series("one", [(0.5, 3)])], [Marker(1, "end")]
    )
    svg = ElementTree.fromstring(text)
    words = [node.text for node in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"A & B", "x < y", "one", "end"} <= set(words)


def test_a_chart_of_nothing_says_so():
    assert "nothing was measured" in line_chart("empty", "x", "y", [])


def test_rows_at_the_primary_are_in_proportion_to_writes():
    views = Views()
    views.add(1.0, pending=10)
    views.add(2.0, pending=30)
    views.add_rows(4, pending=30)
    views.add(3.0, pending=40)
    views.add(4.0, pending=50)
    views.add_rows(8, pending=50)
    views.add(5.0, pending=55)
    assert views.primary_rows() == [0, 4, 6, 8, 8]


def test_counts_from_before_a_daemon_that_counts_anew_are_forgotten():
    views = Views()
    views.add(1.0, pending=100)
    views.add_rows(7, pending=100)
    views.add(2.0, pending=3)
    assert (views.times, views.said) == ([2.0], [])


def test_the_views_chart_ends_at_the_disaster(tmp_path):
    views = Views()
    for tenth in range(100):
        views.add(tenth / 10, tenth * 100)
        views.add_rows(tenth * 10, tenth * 100)
    path = tmp_path / "ledger"
    path.write_text("".join(f"{n}.2 sent 1 {n}\n{n}.5 ok 1 {n}\n" for n in range(1, 9)))
    svg = views.chart("views", Ledger(path).follow(), [5.9, 6.5, 6.9, 7.3], disaster_at=7.0)
    ElementTree.fromstring(svg)
    assert "disaster" in svg and "secondary: rows durable" in svg


def test_the_answers_chart_shows_every_second_and_event(tmp_path):
    path = tmp_path / "ledger"
    path.write_text("1.0 sent 1 1\n1.5 ok 1 1\n8.0 sent 1 2\n8.5 ok 1 2\n")
    svg = answers_chart("answers", Ledger(path).follow(), 4.0, [(4.0, "disaster"), (5.0, "recovered")])
    words = [node.text for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert {"disaster", "recovered"} <= set(words)


def test_a_summary_ends_with_what_matters_and_a_run_that_failed_shows_nothing():
    told = "nothing that a client was told is lost"
    held = Entry("three-tier", "pipelined", "vm", 1, 50, promise=told, passed=True, confirmed=100)
    held.disaster = "rolling"
    broken = Entry("three-tier", "pipelined", "vm", 2, 50, promise=told, violated=True, confirmed=100, lost=3)
    failed = Entry("three-tier", "pipelined", "vm", 3, 50, promise=told, error="no room\nfor anything")
    last = [summary(entry).splitlines()[-1].strip() for entry in (held, broken, failed)]
    assert last == [
        f"PASS. The promise: {told}",
        f"FAIL. The promise: {told}",
        "ERROR: the run ended before it could be judged: no room",
    ]
    assert "confirmed rows" not in summary(failed)
    assert ["rolling" in summary(entry).split() for entry in (held, broken)] == [True, False]
    rows = [line.split() for line in overview([held, broken, failed]).splitlines()]
    assert [(row[1], row[3], row[-1]) for row in rows] == [
        ("seed", "lost", "outcome"),
        ("1", "0", "PASS"),
        ("2", "3", "FAIL"),
        ("3", "0", "ERROR"),
    ]
    assert [row[-2] for row in rows[:2]] == ["disaster", "rolling"]


def test_a_store_has_its_own_figures_and_names_what_is_broken():
    entry = Entry("shards", "async", "process", 1, 25, promise="a prefix", passed=True, confirmed=100, lost=7)
    entry.dangling, entry.dangling_rows, entry.rpo_ms, entry.disaster = (
        1,
        ["row 8 of chain 2 without row 7"],
        43.4,
        "slow",
    )
    of_shard = {"apply_to": "0/30A2F40", "left_out": 5, "ready_ms": 3, "promoted_ms": 40}
    entry.store = {
        **{"watermark": "off", "cut": "2026-12-01T00:00:00.5", "cut_before_disaster_ms": 45.6, "recover_ms": 285.0},
        **{"shards": {"s0": of_shard}, "chains": 9, "killed": "the backup server", "back_s": 1.2},
    }
    lines = summary(entry).splitlines()
    for words in (
        ["loss window", "43.4 ms"],
        ["s0: log up to 0/30A2F40", "3 and 40 ms"],
        ["commits left out", "0, 0, 0, 5"],
        ["killed: the backup server", "1.2 s"],
        ["cut 2026-12-01T00:00:00.5"],
        ["broken: row 8 of chain 2 without row 7"],
    ):
        assert any(all(word in line for word in words) for line in lines), words
    assert not any("RTO" in line or "hold" in line for line in lines)
    # A run that ended before its recovery has none of them.
    entry.store, entry.passed = {"watermark": "on"}, False
    assert "the cut" not in summary(entry)


def test_a_run_that_may_lose_rows_says_how_many_and_a_chosen_point_what_was_given_up():
    lossy = Entry("primary-dies", "async", "vm", 1, 50, promise="a prefix", passed=True, confirmed=100, lost=7)
    assert summary(lossy).splitlines()[-1].strip() == "PASS, 7 rows lost. The promise: a prefix"
    oops = Entry("oops", "pipelined", "vm", 1, 50, promise="before", passed=True, confirmed=100, given_up=31)
    line = next(line for line in summary(oops).splitlines() if "given up" in line)
    assert line.split()[-1] == "31"
    assert "given up" not in summary(lossy)
