"""What the benchmark does with its measurements: nothing here measures."""

from __future__ import annotations

import struct
from xml.etree import ElementTree

import pytest

from tidelock_testbed.bench import reads, release, report, switchover, tagging, tiers, work
from tidelock_testbed.bench.__main__ import MEASURES, main
from tidelock_testbed.bench.application import LAYOUTS, Replies
from tidelock_testbed.bench.charts import bar_chart, on_white
from tidelock_testbed.bench.commits import cell
from tidelock_testbed.bench.fio import WORKLOADS, FioResult, Workload
from tidelock_testbed.bench.gate import summarise
from tidelock_testbed.bench.nbd import PLACES, compare, is_compared
from tidelock_testbed.bench.postgres import Turn, read_log
from tidelock_testbed.bench.servers import NBDKIT, NBDKIT_NO_CACHE, OURS, QEMU_NATIVE, QEMU_URING
from tidelock_testbed.bench.settings import Settings
from tidelock_testbed.bench.shards_back import back_after
from tidelock_testbed.bench.shardsites import lags_ms
from tidelock_testbed.bench.spread import Half, Spread, percentile, ratio
from tidelock_testbed.bench.targets import verdicts
from tidelock_testbed.bench.timeline import PHASES, Segment, phases, read_pcap
from tidelock_testbed.ledger import Ledger
from tidelock_testbed.svg import Series, line_chart

WRITE = Workload("write", "randwrite", "4k", 1)
READ = Workload("read", "randread", "4k", 1)
FLUSHED = Workload("flushed", "randwrite", "4k", 1, writes_per_flush=1)


def turns(*iops: float) -> list[FioResult]:
    """Turns that differ in nothing else."""
    return [FioResult(value, value / 256, 10, 20) for value in iops]


def test_a_ratio_pairs_turns_that_stood_beside_each_other():
    # The machine became twice as slow in the middle; no ratio shows it.
    assert ratio([200, 100, 100], [100, 50, 50]) == Spread(2, 2, 2)
    with pytest.raises(ValueError, match="shorter"):
        ratio([1, 2], [1])


def test_percentiles_are_values_that_were_measured():
    assert [percentile([3, 1, 2], percent) for percent in (0, 50, 99, 100)] == [1, 2, 3, 3]


def test_nbdkit_is_compared_where_it_does_the_same_work():
    assert not is_compared("disk", NBDKIT_NO_CACHE, WRITE)
    assert not is_compared("disk", NBDKIT, READ)
    assert is_compared("disk", NBDKIT_NO_CACHE, READ)
    assert is_compared("disk", NBDKIT, FLUSHED)
    assert is_compared("memory", NBDKIT, WRITE)
    for server in (OURS, QEMU_NATIVE, QEMU_URING):
        assert all(is_compared(place, server, workload) for place in PLACES for workload in WORKLOADS)


def test_ours_is_compared_with_the_best_of_those_that_are_compared():
    row = compare(
        WRITE,
        {OURS.key: turns(90, 100), "slow": turns(50, 50), "good": turns(100, 100), "cached": turns(900, 900)},
        {OURS.key, "slow", "good"},
    )
    assert row["best_other"] == "good"
    assert row["ratio"] == {"min": 0.9, "median": 0.95, "max": 1.0}
    assert not row["servers"]["cached"]["compared"]


def log_line(at_s: float, took_ms: float) -> str:
    """A line as pgbench writes it."""
    return f"0 1 {took_ms * 1e3:.0f} 0 {int(at_s)} {round(at_s % 1 * 1e6)}"


def test_what_was_answered_while_warming_up_or_after_the_end_is_not_counted():
    lines = [log_line(100 + tenth / 10, 50) for tenth in range(1, 60)]
    turn = read_log(lines, warm_up_s=1, seconds=3)
    # The first request left at 100.05; counted are the answers from 101.05 to 103.05.
    assert turn == Turn(tps=10.0, p50_ms=50, p99_ms=50, transactions=20)
    assert read_log([], 1, 3) is None
    assert read_log(lines[:2], 1, 3) is None


def frame(source_port: int, destination_port: int, seq: int, payload: int, protocol: int = 6) -> bytes:
    """A TCP segment over IPv4, without what nobody reads."""
    ip = struct.pack("!BxHxxxxxBxx8x", 0x45, 40 + payload, protocol)
    tcp = struct.pack("!HHIxxxxB7x", source_port, destination_port, seq, 5 << 4)
    return bytes(12) + b"\x08\x00" + ip + tcp + bytes(payload)


def test_captures_hold_segments_with_a_payload(tmp_path):
    frames = [frame(5432, 1, 7, 10), frame(5432, 1, 17, 0), frame(5432, 1, 17, 10, protocol=17), b"short"]
    path = tmp_path / "pcap"
    head = struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 128, 1)
    records = [struct.pack("<IIII", 1, n, len(f), len(f)) + f for n, f in enumerate(frames)]
    path.write_bytes(head + b"".join(records) + b"cut off")
    assert read_pcap(path) == [Segment(1_000_000_000, 5432, 1, 7)]
    path.write_bytes(b"\xd4\xc3\xb2\xa1" + head[4:])
    with pytest.raises(ValueError, match="nanoseconds"):
        read_pcap(path)


def test_a_reply_is_followed_backwards_to_its_request():
    def at(us: int, source: int, destination: int, seq: int) -> Segment:
        return Segment(us * 1000, source, destination, seq)

    # RTT 1 ms. The first reply's record is the second of two; the last reply was never seen at the guest.
    seen = {
        "client": [at(0, 9, 5432, 1), at(1900, 5432, 9, 1), at(3000, 9, 5432, 2), at(5000, 5432, 9, 2)],
        "guest": [at(10, 9, 5432, 1)],
        "host": [at(100, 8, 9640, 1), at(300, 8, 9640, 2), at(1700, 9640, 8, 1), at(1800, 9640, 8, 2)],
        "backup": [at(640, 8, 9640, 1), at(850, 8, 9640, 2), at(1050, 9640, 8, 1), at(1250, 9640, 8, 2)],
    }
    found = phases(seen, 5432, 9640, one_way_ms=0.5)
    assert [list(one.values()) for one in found] == [[10, 290, 50, 400, 50, 100]]
    assert list(found[0]) == list(PHASES)
    assert sum(found[0].values()) == 1900 - 1000


def results(pipelined_tps: float, sync_tps: float) -> dict:
    """Results of PostgreSQL's part, with what matters to its targets."""

    def modes(pipelined: float) -> dict[str, list[Turn]]:
        return {
            "unprotected": [Turn(100, 1, 2, 100)],
            "async": [Turn(100, 1, 2, 100)],
            "pipelined": [Turn(pipelined, 52, 60, 100)],
            "sync": [Turn(sync_tps, 60, 70, 100)],
        }

    return {
        "c": {
            "insert": [cell(50, 1, modes(19))],
            "locked": [cell(50, clients, modes(clients * 10)) for clients in (1, 24)],
            "full": cell(50, 800, modes(pipelined_tps)),
        }
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [((95, 20), [True, True]), ((94, 21), [False, False])],
)
def test_targets_are_reached_at_their_limit_and_short_one_step_past_it(given, expected):
    assert [verdict.reached for verdict in verdicts(results(*given))] == expected


def activity_rows(ratio_of_all: float, ratio_small: float = 0.6) -> list[dict]:
    """Part (m), with this ratio over the whole disk, and this one with a map for a quarter of it."""

    def spread(middle: float) -> dict:
        return {"min": middle, "median": middle, "max": middle}

    return [
        {
            "share": share,
            "workload": "4 KiB random write, QD 1",
            "iops": {setup: spread(1000.0) for setup in ("off", "on", "small")},
            "ratio": spread(ratio),
            "ratio_small": spread(ratio_small),
        }
        for share, ratio in (("1 %", 0.99), ("100 %", ratio_of_all))
    ]


def test_the_activity_log_has_two_targets(tmp_path):
    """A working set in the map, and one that may need the log more often, also where the map cannot hold it."""

    def reached(*ratios: float) -> list[bool | None]:
        return [v.reached for v in verdicts({"m": {"rows": activity_rows(*ratios)}})]

    assert reached(0.86, 0.86) == [True, True, True]
    assert reached(0.84, 0.86) == [True, False, True]
    assert reached(0.86, 0.84) == [True, True, False]
    report.save(tmp_path, "m", {"processors": 2}, 0.0, {"rows": activity_rows(0.9)})
    report.write(tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "| 100 % | 4 KiB random write, QD 1 | 1,000 | 1,000 | ×0.90 | ×0.60 |" in page


def reply_rows(over_ms: float) -> list[dict]:
    """Replies at low load over two WANs and none."""
    timeline = {"replies": 9, "phases_us": dict.fromkeys(PHASES, 300.0), "over_rtt_us": 1800.0}

    def row(rtt_ms: int, over_ms: float) -> dict:
        reply = Spread.of([rtt_ms + over_ms]).json()
        return {
            "rtt_ms": rtt_ms,
            "p50_ms": dict.fromkeys(("unprotected", "async", "pipelined"), reply),
            "timeline": timeline,
        }

    return [row(200, over_ms), row(50, 1.5), row(0, 9)]


@pytest.mark.parametrize(("over_ms", "reached"), [(2, True), (2.1, False)])
def test_every_wide_area_must_keep_within_the_limit(over_ms, reached):
    (found,) = verdicts({"l": {"rows": reply_rows(over_ms)}})
    assert found.reached is reached
    assert found.measured == f"50 ms + 1.50, 200 ms + {over_ms:.2f}"


def test_the_page_of_a_reply_has_every_phase(tmp_path):
    report.save(tmp_path, "l", {"processors": 2}, 0.0, {"rows": reply_rows(2)})
    report.write(tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert all(f"| {what} | 300 | 300 | 300 |" in page for what in PHASES.values())
    assert "| **together** | 1,800 | 1,800 | 1,800 |" in page


def test_the_gates_rounds_are_compared_within_themselves():
    def one(slow: float) -> dict:
        figures = {"unprotected": (400, 6.0, None), "covered": (200, 8.0, None), "uncovered": (100, None, 5.0)}
        return {
            "packet_filter": "any",
            "rows": [
                {
                    "path": path,
                    "traffic": traffic,
                    "packets_per_s": packets / slow,
                    "round_trip_us_median": trip and trip * slow,
                    "round_trip_us_p99": trip,
                    "release_us_median": release,
                    "tcp_gbit_per_s": 10,
                    "dropped_by_kernel": None if traffic == "unprotected" else 1,
                }
                for path in ("routed", "bridged")
                for traffic, (packets, trip, release) in figures.items()
            ],
        }

    rows = summarise([one(1), one(2)])["rows"]
    assert [row["packets_ratio"]["median"] for row in rows] == [1, 0.5, 0.25] * 2
    assert rows[1]["added_us"] == {"min": 2, "median": 3, "max": 4}
    assert rows[2]["added_us"]["median"] == 5
    assert rows[2]["dropped_by_kernel"] == 2


def replies(mean_ms: float) -> Replies:
    """A turn of an application's clients."""
    return Replies(mean_ms, mean_ms, 1, 100)


@pytest.mark.parametrize(("joint_ms", "reached"), [(64.9, True), (65.1, False)])
def test_what_tiers_add_is_counted_within_a_round_and_beyond_one_round_trip(joint_ms, reached):
    means = {"sync": 110, "pipelined": joint_ms, "async": 10}
    # The machine was slower by a second in the second round: no difference shows it.
    turns = {
        (count, mode): [replies(mean), replies(1000 + mean), replies(mean)]
        for count in (1, 2, 3)
        for mode, mean in means.items()
    }
    slower = {key: [replies(2 * one.mean_ms) for one in turn] for key, turn in turns.items()}
    rows = [*tiers.summarise("one host", turns), *tiers.summarise("two hosts", slower)]
    assert [row["added_ms"]["sync"]["max"] for row in rows] == [100] * 3 + [200] * 3
    joint, sync = verdicts({"g": {"rtt_ms": 50, "rows": rows[:3]}})
    assert joint.reached is reached
    # Two round trips are not enough for three tiers.
    assert (sync.measured, sync.reached) == ("1: 2.0, 2: 2.0, 3: 2.0 (one host)", False)
    joint, sync = verdicts({"g": {"rtt_ms": 50, "rows": rows}})
    assert (joint.reached, sync.reached) == (False, False)
    assert sync.measured == "1: 2.0, 2: 2.0, 3: 2.0 (one host); 1: 4.0, 2: 4.0, 3: 4.0 (two hosts)"
    assert verdicts({"g": {"rtt_ms": 50, "rows": rows[3:]}})[1].reached


def test_replies_are_counted_between_the_times_given_and_after_the_warm_up(tmp_path):
    path = tmp_path / "ledger"
    lines = [f"{n}.0 sent 1 {n}\n{n}.{n} ok 1 {n}\n" for n in range(1, 9)]
    path.write_text("".join(lines))
    found = Replies.of(Ledger(path).follow(), begin=2, end=7)
    # Rows 4, 5 and 6: three were warming up, and row 7 was too late.
    assert (found.mean_ms, found.p50_ms, found.per_s) == (pytest.approx(500), pytest.approx(500), pytest.approx(0.6))
    with pytest.raises(RuntimeError, match="only 1 replies"):
        Replies.of(Ledger(path).follow(), begin=2, end=5)


def test_pages_of_applications_have_every_figure(tmp_path):
    spread = {"min": 1.0, "median": 2.0, "max": 3.0}
    of_reads = dict.fromkeys(("mean_ms", "deviation_ms", "reads_per_s", "writes_per_s"), spread)
    results = {
        "f": {
            "rtt_ms": 50,
            "points": [
                {"layout": on, "work_ms": w, "mean_ms": dict.fromkeys(work.VARIANTS, spread), "tagged": spread}
                for on in LAYOUTS
                for w in (0, 75)
            ],
        },
        "g": {
            "rtt_ms": 50,
            "rows": [
                {
                    "layout": on,
                    "protected": n,
                    "mean_ms": dict.fromkeys(tiers.MODES, spread),
                    "added_ms": dict.fromkeys(tiers.MODES, spread),
                    "tagged": spread,
                }
                for on in LAYOUTS
                for n in (1, 2, 3)
            ],
        },
        "h": {
            "rtt_ms": 50,
            "reads_per_s": 100,
            "points": [{"write_rate": n, "modes": dict.fromkeys(reads.MODES, of_reads)} for n in (0, 100)],
        },
    }
    for part, result in results.items():
        report.save(tmp_path, part, {"processors": 2}, 0.0, result)
    report.write(tmp_path)
    page = (tmp_path / "README.md").read_text()
    charts = sorted(path.name for path in tmp_path.glob("*.svg"))
    of_layouts = [f"{part}-{on}-host{s}.svg" for part in ("f-work", "g-tiers") for on, s in (("one", ""), ("two", "s"))]
    assert charts == [*of_layouts, "h-reads-deviation.svg", "h-reads-mean.svg"]
    assert all(f"({chart})" in page for chart in charts)
    assert page.count("2.0 (1.0 to 3.0)") == 2 * (2 * 5 + 3 * 6) + 2 * 3


def test_every_part_can_be_asked_for_and_has_a_page(capsys):
    assert list(MEASURES) == list(report.PARTS) == sorted(MEASURES)
    with pytest.raises(SystemExit):
        main(["--only", "a,z"])
    assert f"there is no part z: choose from {', '.join(MEASURES)}" in capsys.readouterr().err


def test_a_quick_run_takes_fewer_turns_of_everything():
    quick, full = Settings.of(True), Settings.of(False)
    for name in ("rounds", "pgbench_rounds", "application_rounds", "tagging_rounds"):
        assert getattr(quick, name) < getattr(full, name)
    assert quick.results != full.results


def test_the_middle_half_leaves_out_what_stands_alone():
    assert Half.of([1, 2, 3, 4, 1000]) == Half(2, 3, 4)


def tagging_found(
    added_us: float, share: float, paths: int = 1, share_on_taps: float = 0.99, name: str = "vector"
) -> dict:
    """What tagging-bench tells, of guards that add so much and leave this share."""

    def turn(cable: str, more_us: float, times: float, slow: float) -> dict:
        # What slows a turn down slows down the one beside it.
        trips = {trip: 10 + slow + more_us for trip in tagging.TRIPS if cable == "Veth"}
        return trips | {rate: 100 / (1 + slow) * times for rate in tagging.RATES}

    def guard(cable: str, name: str, more_us: float, times: float) -> dict:
        turns = [turn(cable, more_us, times, slow) for slow in (0, 1, 0, 9, 0)]
        return {"guard": name, "turns": turns, "program_ns": {"from_guest": 700.0}, "counted": {"tagged": 1}}

    def guards(cable: str) -> list[dict]:
        left = share if cable == "Veth" else share_on_taps
        return [guard(cable, "none", 0, 1), guard(cable, name, added_us, left), guard(cable, "queue", 15, 0.5)]

    found = [
        {"path": path, "cable": cable, "packet_filter": "nft", "guards": guards(cable)}
        for cable in tagging.CABLES
        for path in list(tagging.PATHS)[:paths]
    ]
    return {"rounds": 5, "paths": found}


def test_tags_are_compared_with_the_turns_beside_them():
    rows = tagging.summarise(tagging_found(4, 0.9, paths=3))["rows"]
    assert [(row["cable"], row["path"], row["guard"]) for row in rows] == [
        (cable, path, guard)
        for cable in tagging.CABLES.values()
        for path in tagging.PATHS.values()
        for guard in ("vector", "queue")
    ]
    assert rows[-1]["added_us"] == {}, "on taps round trips tell when threads are woken"
    assert rows[0]["added_us"]["udp_us"] == {"low": 4, "median": 4, "high": 4}
    assert rows[0]["ratios"]["gbit_per_s"] == pytest.approx({"low": 0.9, "median": 0.9, "high": 0.9})
    assert rows[0]["without"]["udp_us"] == 10


def test_the_bursts_of_a_turn_are_compared_with_those_beside_them():
    found = tagging_found(4, 0.9)
    guards = found["paths"][0]["guards"] = found["paths"][0]["guards"][:2]
    for without, beside in zip(*(guard["turns"] for guard in guards), strict=True):
        # The machine is slower in the second one, and something disturbed the third.
        without["gbit_per_s"] = [50, 20, 50, 50]
        beside["gbit_per_s"] = [45, 18, 5, 45]
    row = tagging.summarise(found)["rows"][0]
    assert row["ratios"]["gbit_per_s"] == pytest.approx({"low": 0.9, "median": 0.9, "high": 0.9})
    assert row["without"]["gbit_per_s"] == 50


@pytest.mark.parametrize(
    ("added_us", "share", "expected"),
    [(5, 0.97, [True, True]), (5.1, 0.969, [False, False])],
)
def test_what_tags_may_cost_is_judged_at_its_limit_and_one_step_past_it(added_us, share, expected):
    result = tagging.summarise(tagging_found(added_us, share))
    result["rows"] = [row for row in result["rows"] if row["guard"] == "vector"]
    trip, *on_taps, datagrams_on_taps, stream, paced, datagrams = verdicts({"i": result})
    assert [trip.reached, stream.reached] == expected
    assert paced.reached == stream.reached
    assert all(verdict.reached for verdict in on_taps)
    assert datagrams.reached is None and datagrams_on_taps.reached is None


def test_what_needs_no_tag_is_judged_beside_what_has_one():
    result = tagging.summarise(tagging_found(1, 0.96, share_on_taps=0.96))
    covered = tagging.summarise(tagging_found(1, 0.98, share_on_taps=0.98, name=tagging.COVERED))
    result["rows"] = [row for row in result["rows"] + covered["rows"] if row["guard"] != "queue"]
    found = [(verdict.target, verdict.reached) for verdict in verdicts({"i": result}) if "stream" in verdict.target]
    assert len(found) == 8
    assert all(reached == ("all covered" in target) for target, reached in found)


@pytest.mark.parametrize(("share", "reached"), [(0.97, True), (0.969, False)])
def test_covered_traffic_is_judged_beside_the_queue_and_not_through_it(share, reached):
    found = verdicts({"j": tagging.summarise(tagging_found(1, share, share_on_taps=share - 0.001))})
    assert [verdict.reached for verdict in found] == [False] * 3 + [reached] * 3
    assert all("queue" not in verdict.measured for verdict in found)


def release_found() -> dict:
    """What release-bench tells."""
    turns = [dict.fromkeys(release.FIGURES, ns) for ns in (30.0, 10.0, 20.0)]
    rows = [{"stamp": stamp, "turns": turns} for stamp in ("1 entry", "hlc")]
    return {"held_packets": 100_000, "held_by_kernel": 60_000, "rows": rows}


def test_releases_have_a_row_for_each_stamp_and_no_target():
    result = release.summarise(release_found())
    assert [row["stamp"] for row in result["rows"]] == ["1 entry", "hlc"]
    assert result["rows"][0]["figures"]["let_out_ns"] == {"min": 10, "median": 20, "max": 30}
    found = verdicts({"k": result})
    assert [verdict.reached for verdict in found] == [None, None]
    assert found[0].measured == "1 entry 20 ns, hlc 20 ns"


def test_pages_of_packets_have_every_figure_and_a_profile_where_they_are_short(tmp_path):
    result = tagging.summarise(tagging_found(4, 0.9, paths=3)) | {"profiles": []}
    (row, rate), *_ = tagging.short(result["rows"])
    place = {name: row[name] for name in ("path", "cable", "guard")}
    functions = tagging.added({"nft_do_chain": 7.0, "copy": 83.0}, {"copy": 90.0}, 0.9)
    profiled = result | {"profiles": [{"rate": rate, **place, "functions": functions}]}
    for part, of_part in {"i": result, "j": profiled, "k": release.summarise(release_found())}.items():
        report.save(tmp_path, part, {"processors": 2}, 0.0, of_part)
    report.write(tmp_path)
    page = (tmp_path / "README.md").read_text()
    for chart in ("i-tags.svg", "j-covered.svg", "k-release.svg"):
        assert f"({chart})" in page
        assert ElementTree.fromstring((tmp_path / chart).read_text()).tag.endswith("svg")
    assert page.count("4.00 (4.00 to 4.00)") == 2 * 3 * 3
    assert page.count("| 0.90 (0.90 to 0.90) |") == 2 * 3 * len(tagging.RATES)
    assert page.count("<details>") == 1
    assert "| +7.8 | 7.8 | 0.0 | `nft_do_chain` |\n| +2.2 | 92.2 | 90.0 | `copy` |" in page
    assert page.count("20 (10 to 30)") == 2 * 4


def test_of_each_cable_and_rate_the_row_that_has_most_to_lose_is_profiled():
    result = tagging.summarise(tagging_found(4, 0.9, paths=3, share_on_taps=0.97, name="covered"))
    found = tagging.short(result["rows"])
    assert [(row["cable"], row["guard"], rate) for row, rate in found] == [
        ("veths", "covered", rate) for rate in tagging.LOADS
    ]
    assert tagging.short(tagging.summarise(tagging_found(4, 0.97))["rows"]) == []


def test_charts_are_whole_documents():
    bars = bar_chart("a < b", "unit", ["x", "y"], [("group & co", [(1.0, "1/s"), (0.0, "0/s")])])
    lines = on_white(line_chart("t", "x", "y", [Series("s", [(0, 1), (2, 3)])]))
    for svg in (bars, lines):
        assert ElementTree.fromstring(svg).tag.endswith("svg")


def history(ingest: float, fold: float, folded: float, opened_us: float) -> dict:
    """What part (n) finds, in short."""
    spread = {"min": 0.9, "median": 1.0, "max": 1.1}
    times = {"p50": 30.0, "p99": 60.0}
    view = {"mib": 1024, "one_in": 4, "records": 9, "segments": 2, "held_kib": 2048, "views": 40, "views_kib": 1024}
    view |= {which: {"segments": 1, "indexes": 2, "maps": 3} for which in ("disk_bytes", "formula_bytes")}
    view |= {f"{name}_us": times for name in ("resolved", "first_read", "later_read", "raw_read")}
    servers = ("view", "chain", "reflink")
    rate = {"iops": dict.fromkeys(servers, spread), "ratio": dict.fromkeys(servers[1:], spread)}
    return {
        "ingest": {f"{name}_mib_per_s": spread for name in ("plain", "window", "without_indexes")}
        | {"ratio": spread | {"median": ingest}, "without_indexes_ratio": spread},
        "folds": [
            {"name": "fresh", "ingest_mib_per_s": spread, "fold_mib_per_s": spread, "ratio": spread | {"median": fold}}
            | {"write_amplification": 2.1, "written_of_all": 0.9}
        ],
        "busy_fold": {"workload": "writes", "seconds": 75, "disk_mib": 1024, "drained_s": 0.5}
        | {"ingest_mib_per_s": 50.0, "fold_mib_per_s": folded}
        | {"disk_itself_mib_per_s": {"random": 110.5, "sequential": 700.1}}
        | {"waiting_mib": {"first_half": 40.0, "second_half": 41.0, "at_the_end": 15.3}},
        "views": [view | {"opened_us": {"p50": opened_us, "p99": opened_us}}],
        "left_out_mib": [51200],
        "busy": {"workload": "writes", "iops": 2000, "seconds": 75, "disk_mib": 1024},
        "reads": [{"workload": "4 KiB random read, QD 1"} | rate],
        "opening": dict.fromkeys(servers, spread),
        "memory_mib": dict.fromkeys(servers, 8.5),
        "commit": {"overlay_mib": 9, "mib_per_s": 99.5},
        "rolling": [{"span_s": 1, "written_mib": 8, "seconds": {"view": spread, "snapshot": spread}}],
    }


def test_the_past_has_its_targets_and_its_page(tmp_path):
    def reached(**found: float) -> list[bool | None]:
        return [verdict.reached for verdict in verdicts({"n": history(**found)})]

    good = {"ingest": 0.98, "fold": 1.2, "folded": 49.9, "opened_us": 9_000}
    short = {"ingest": 0.96, "fold": 0.9, "folded": 40.0, "opened_us": 21_000}
    assert reached(**good) == [True, True, True, None, None, None, None, True, True]
    assert reached(**short) == [False, False, True, None, None, None, None, False, False]
    report.save(tmp_path, "n", {"processors": 2}, 0.0, history(**good))
    report.write(tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "| 1 GiB, 1 in 4 | 9.0 (9.0) |" in page and "no room for a journal of 50 GiB" in page


def comeback(of_link: float, live: float) -> dict:
    """What (o) finds."""
    one = Spread.of([1.0]).json()
    return {
        "rtt_ms": 50,
        "link_mib_per_s": 32,
        "queue_ms": 50,
        "resynced_mib": 256,
        "restarts": {"killed": Spread.of([450.0]).json(), "stopped": Spread.of([400.0]).json()},
        "resync_mib_per_s": one,
        "plain_mib_per_s": one,
        "resync_of_link": Spread.of([of_link]).json(),
        "live_p50_ms": {"before": one, "meanwhile": one},
        "live_ratio": Spread.of([live]).json(),
    }


@pytest.mark.parametrize(("of_link", "live", "reached"), [(0.9, 1.1, [True, True]), (0.89, 1.11, [False, False])])
def test_a_resync_fills_the_link_and_leaves_others_their_commits(tmp_path, of_link, live, reached):
    found = verdicts({"o": comeback(of_link, live)})
    assert [verdict.reached for verdict in found] == [None, *reached]
    report.save(tmp_path, "o", {"processors": 2}, 0.0, comeback(of_link, live))
    report.write(tmp_path)
    assert "| killed | 450 (450 to 450) |" in (tmp_path / "README.md").read_text()


def test_what_a_switch_takes_has_medians_quartiles_and_its_parts(tmp_path):
    names = (*switchover.WAITED, *switchover.PARTS)
    turns = [dict.fromkeys(names, ms) for ms in (100.0, 1.0, 20.0, 30.0, 40.0)]
    row = {"rtt_ms": 50, "load": "at idle", **switchover.summarise(turns)}
    assert row["waited_ms"]["guest"] == {"low": 20, "median": 30, "high": 40}
    result = {"turns": 5, "rows": [row]}
    (found,) = verdicts({"q": result})
    assert found.reached is None and found.measured == "RTT 50 ms: 30 and 30 ms"
    report.write(tmp_path)
    assert "(q)" not in (tmp_path / "README.md").read_text(), "not measured yet"
    report.save(tmp_path, "q", {"processors": 2}, 0.0, result)
    report.write(tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "| 50 | at idle | 30 (20 to 40) | 30 (20 to 40) |" in page
    assert f"| 50 | at idle |{' 30 |' * len(switchover.PARTS)}" in page


@pytest.mark.parametrize(("end_mib", "reached"), [(64.0, True), (70.0, False)])
def test_memory_in_an_outage_does_not_grow_after_half_of_it(tmp_path, end_mib, reached):
    mibs = {"first": 20, "half": 60, "end": end_mib, "after": 60}
    outage = {f"{when}_mib": {"tidelockd": mib} for when, mib in mibs.items()}
    goes_on = {"seconds": 3600.0, "state": "degraded", "written_mib": 7031, **outage}
    result = {"iops": 500, "backlog_mib": 64, "on_disk_mib": 256, "outages": {"goes on": goes_on}}
    (found,) = verdicts({"p": result})
    assert found.reached is reached
    report.save(tmp_path, "p", {"processors": 2}, 0.0, result)
    report.write(tmp_path)
    row = f"| goes on | 3600 | `degraded` | 7,031 | `tidelockd` | 20 | 60 | {end_mib:g} | 60 |"
    assert row in (tmp_path / "README.md").read_text()


def stamp(ms: float) -> int:
    """Of milliseconds since the epoch."""
    return int(ms) << 16 | int(ms % 1 * 65536)


def test_an_entry_lags_until_the_first_watermark_that_covers_it():
    def ns(ms: float) -> int:
        return int(ms * 1e6)

    # A watermark that comes again, or goes back, says nothing new.
    marks = [(ns(113), stamp(100)), (ns(114), stamp(101)), (ns(115), stamp(100.5)), (ns(120), stamp(102))]
    entries = [(ns(100), stamp(99.5)), (ns(101), stamp(101)), (ns(102), stamp(101.5)), (ns(103), stamp(102.5))]
    assert lags_ms(entries, marks) == [13, 13, 18], "the last one is not covered"


def test_a_store_is_back_with_a_young_watermark_of_later_than_the_kill():
    def heard(at_ms: float, age_ms: float) -> tuple[int, int]:
        return int(at_ms * 1e6), stamp(at_ms - age_ms)

    before = [heard(at, 13) for at in range(1000, 2000, 10)]
    under_way = [heard(2005, 13)]
    behind = [heard(2500, 500), heard(2510, 400)]
    found = back_after([*before, *under_way, *behind, heard(2550, 17)], 2000 * 10**6, 2010 * 10**6)
    assert (found["back_s"], found["steady_ms"], found["worst_ms"]) == (0.54, 13, 500)
    with pytest.raises(RuntimeError, match="steady"):
        back_after([*before, *under_way, *behind], 2000 * 10**6, 2010 * 10**6)


def store_results(lag_ms: float, back_s: float) -> dict:
    """Part (r), with this lag of many shards, and this time after a kill."""

    def spread(middle: float) -> dict:
        return Spread.of([middle]).json()

    turn = {"p50_ms": lag_ms, "commit_ms": 0.1, "worst_ms": 300.0}
    killed = {"turns": [turn], "back_s": spread(back_s)}
    rows = [
        {"shards": count, "how": "together", "every_us": 10_000, "turns": [turn], "p99_ms": spread(9)}
        for count in (1, 512)
    ]
    return {
        "rtt_ms": 25,
        "synthetic": [{**row, "mean_ms": spread(lag_ms if row["shards"] > 1 else 0.1)} for row in rows],
        "comebacks": {"leader and PSA": {"turns": [turn], "back_s": spread(0.1)}},
        "readiness": {"shards": 8, "ready_ms": spread(5)},
        "postgres": {
            "shards": 4,
            "rates": [{"per_s": rate, "turns": [turn], "mean_ms": spread(400 / rate)} for rate in (100, 200)],
            "commits": {"clients": 8, "without": spread(100), "with": spread(97), "ratio": spread(0.97)},
            "commits_in_memory": {"clients": 8, "without": spread(100), "with": spread(50), "ratio": spread(0.5)},
            "daemon_killed": killed,
        },
        "promotion": {"shards": 4, "answered_ms": spread(200), "ready_ms": spread(3), "promoted_ms": spread(40)},
        "snapshots": {"every_s": 0.5, "mean_ms": 280.0},
    }


def test_shard_logs_have_targets_of_which_the_worst_figure_counts(tmp_path):
    def reached(lag_ms: float, back_s: float) -> list[bool | None]:
        return [verdict.reached for verdict in verdicts({"r": store_results(lag_ms, back_s)})]

    assert reached(0.5, 0.5) == [True, True, True, True, True, None, None]
    assert reached(0.51, 0.51) == [False, True, True, False, True, None, None]
    report.save(tmp_path, "r", {"processors": 2}, 0.0, store_results(0.5, 0.5))
    report.write(tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "| 512 | together | 0.50 (0.50 to 0.50) | 0.50 | 9.00 |" in page
    assert "| `tidelockd` | 0.50 (0.50 to 0.50) | 300 |" in page
