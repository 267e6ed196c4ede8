"""The checkers of applications find what is planted, and nothing else."""

from __future__ import annotations

import pytest

from tidelock_testbed.applications import THREE_TIER, TWO_WRITERS
from tidelock_testbed.invariants import dangling_rows, examine, told_and_missing
from tidelock_testbed.ledger import Ledger
from tidelock_testbed.net import GuestNet

DISASTER = 100.0


def told(tmp_path, confirmed: int, sent: int) -> Ledger:
    """One client that asked for rows 1 to `sent`, one a second, and was told of those up to `confirmed`."""
    path = tmp_path / "ledger"
    lines = [f"{n}.0 sent 1 {n}\n" for n in range(1, sent + 1)] + [f"{n}.5 ok 1 {n}\n" for n in range(1, confirmed + 1)]
    path.write_text("".join(lines))
    return Ledger(path).follow()


def tiers(rows: int) -> dict:
    """A three-tier application's databases with this many rows, each written as the tiers write them."""
    outer = {(1, n): (1, n - 1) if n > 1 else None for n in range(1, rows + 1)}
    return {"front": dict(outer), "middle": dict(outer), "back": dict.fromkeys(outer)}


def transfers(rows: int) -> dict:
    """Two databases of transfers, the even ones written into `a` first."""
    a, b = {}, {}
    for n in range(1, rows + 1):
        first, second = (a, b) if n % 2 == 0 else (b, a)
        first[1, n] = (1, n - 1) if n > 1 else None
        second[1, n] = (1, n)
    return {"a": a, "b": b}


def test_whole_databases_have_nothing_wrong(tmp_path):
    ledger = told(tmp_path, confirmed=9, sent=10)
    for application, databases in ((THREE_TIER, tiers(10)), (TWO_WRITERS, transfers(10))):
        found = examine(application, databases, ledger, DISASTER)
        assert found.lost() == set()
        assert found.dangling == []
        assert {verdict.recovered_unconfirmed for verdict in found.verdicts.values()} == {1}


def test_a_cut_at_any_write_of_a_request_is_whole(tmp_path):
    """What was written last may be missing: a request that was under way."""
    ledger = told(tmp_path, confirmed=9, sent=10)
    for gone in (["back"], ["back", "middle"], ["back", "middle", "front"]):
        databases = tiers(10)
        for name in gone:
            del databases[name][1, 10]
        found = examine(THREE_TIER, databases, ledger, DISASTER)
        assert (found.lost(), found.dangling) == (set(), []), gone
    databases = transfers(10)
    del databases["b"][1, 10]
    assert dangling_rows(TWO_WRITERS, databases) == []
    del databases["a"][1, 10]
    assert dangling_rows(TWO_WRITERS, databases) == []


@pytest.mark.parametrize("name", THREE_TIER.databases)
def test_a_row_lost_in_one_tier_is_found_whatever_the_others_have(tmp_path, name):
    ledger = told(tmp_path, confirmed=10, sent=10)
    databases = tiers(10)
    del databases[name][1, 10]
    found = examine(THREE_TIER, databases, ledger, DISASTER)
    assert found.lost() == {(1, 10)}
    assert [tier for tier, verdict in found.verdicts.items() if verdict.lost] == [name]


def test_a_row_that_was_written_before_one_that_is_there_must_be_there():
    databases = tiers(10)
    del databases["front"][1, 10]
    (one,) = dangling_rows(THREE_TIER, databases)
    assert str(one) == "row (1, 10) of middle depends on row (1, 10) of front"


def test_a_reference_to_an_inner_row_that_is_missing_is_found():
    databases = tiers(10)
    del databases["back"][1, 10]
    del databases["back"][1, 9]
    # Row 9 of `middle` may lack its inner row; row 10, which names row 9, may not.
    (one,) = dangling_rows(THREE_TIER, databases)
    assert (one.database, one.row, one.missing_in, one.missing) == ("middle", (1, 10), "back", (1, 9))


@pytest.mark.parametrize(("missing_in", "missing", "database"), [("a", 10, "b"), ("b", 9, "a")])
def test_transfers_dangle_in_either_direction(missing_in, missing, database):
    databases = transfers(10)
    del databases[missing_in][1, missing]
    dangling = dangling_rows(TWO_WRITERS, databases)
    assert [(one.database, one.missing) for one in dangling][:1] == [(database, (1, missing))]
    assert {one.missing_in for one in dangling} == {missing_in}


def test_rows_that_are_not_judged_may_be_under_way_but_may_be_depended_on(tmp_path):
    ledger = told(tmp_path, confirmed=9, sent=9)
    databases = tiers(10)
    del databases["front"][1, 10]
    found = examine(THREE_TIER, databases, ledger, DISASTER, judged=lambda row: row[1] < 10)
    assert (found.dangling, found.lost()) == ([], set())
    assert all(verdict.foreign == [] for verdict in found.verdicts.values())


def test_a_row_that_a_page_told_of_must_be_there(tmp_path):
    path = tmp_path / "pages"
    path.write_text("1.0 sent 1 1\n1.1 ok 1 1\n1.1 told 0 1 4\n1.1 told 1 1 4\n2.1 told 0 1 5\n9.0 told 0 1 6\n")
    pages = Ledger(path).follow()
    databases = transfers(4)
    assert told_and_missing(TWO_WRITERS, databases, pages, before=2.0) == []
    assert told_and_missing(TWO_WRITERS, databases, pages, before=3.0) == [("a", (1, 5))]
    del databases["b"][1, 4]
    assert told_and_missing(TWO_WRITERS, databases, pages, before=2.0) == [("b", (1, 4))]


def test_a_database_that_was_not_read_is_no_database_without_rows(tmp_path):
    with pytest.raises(ValueError, match="three-tier has"):
        examine(THREE_TIER, {"front": {}}, told(tmp_path, 1, 1), DISASTER)


def test_each_tier_asks_the_next_and_the_front_of_transfers_both_databases():
    nets = {name: GuestNet(n, segment=True) for n, name in enumerate(["front", "middle", "back"])}
    words = THREE_TIER.web("middle", "postgres", nets)
    assert words == ["--work-ms", "25", "--store", "postgres:127.0.0.1", "--next", "10.77.100.12:8000"]
    assert "--next" not in THREE_TIER.web("back", "postgres", nets)
    nets = {name: GuestNet(n, segment=True) for n, name in enumerate(["a", "b", "front"])}
    words = TWO_WRITERS.web("front", "rowstore", nets)
    assert words[2:] == ["--store", "rowstore:10.77.100.10", "--store", "rowstore:10.77.100.11"]
    assert TWO_WRITERS.web("a", "rowstore", nets) is None
