"""The comparison of causal chains bites: a row without the one before, one that nobody asked for, a lost answer."""

from __future__ import annotations

import pytest

from tidelock_testbed.chains import examine, followed
from tidelock_testbed.ledger import Ledger

DISASTER = 9.0


@pytest.fixture
def ledger(tmp_path) -> Ledger:
    """Chain 1 goes from shard to shard and back, chain 2 begins when row 2 of chain 1 was answered. The last row of
    chain 1 has no answer."""
    path = tmp_path / "ledger"
    path.write_text(
        "1.0 sent 0 1 1\n1.5 ok 0 1 1\n"
        "2.0 sent 1 1 2\n2.2 again 1 1 2\n2.5 ok 1 1 2\n"
        "3.0 sent 0 2 1\n3.1 ok 0 2 1\n"
        "4.0 sent 2 1 3\n4.5 ok 2 1 3\n"
        "5.0 sent 0 1 4\n"
    )
    return Ledger(path).follow()


def examined(ledger: Ledger, *shards: list):
    return examine(ledger, dict(zip(("s0", "s1", "s2"), shards, strict=True)), DISASTER)


@pytest.mark.parametrize(
    "shards",
    [
        ([], [], []),
        ([(1, 1)], [], []),
        ([(1, 1)], [(1, 2)], []),
        ([(1, 1), (2, 1)], [(1, 2)], [(1, 3)]),
        ([(1, 1), (2, 1), (1, 4)], [(1, 2)], [(1, 3)]),
    ],
)
def test_every_prefix_is_one(ledger, shards):
    found = examined(ledger, *shards)
    assert not found.broken and not found.strange and not found.rows.out_of_order


def test_a_row_without_the_one_before_breaks_its_chain(ledger):
    found = examined(ledger, [(1, 1)], [], [(1, 3)])
    assert found.broken == [(1, 3)]
    assert (1, 2) in found.rows.out_of_order
    # A row that was never answered is no exception.
    assert examined(ledger, [(1, 1), (1, 4)], [(1, 2)], []).broken == [(1, 4)]
    assert examined(ledger, [], [(1, 2)], []).broken == [(1, 2)]


def test_what_a_client_of_another_chain_was_told_counts_as_well(ledger):
    found = examined(ledger, [(1, 1), (2, 1)], [], [])
    assert not found.broken
    assert found.rows.out_of_order == [(1, 2)]


def test_a_row_is_where_it_was_asked_for_and_there_once(ledger):
    whole = [[(1, 1), (2, 1)], [(1, 2)], [(1, 3)]]
    for number, row in [(0, (7, 1)), (1, (1, 1)), (0, (1, 1)), (2, (1, 5))]:
        shards = [list(rows) for rows in whole]
        shards[number].append(row)
        assert examined(ledger, *shards).strange == [row]
    assert not examined(ledger, *whole).strange


def test_losses_are_counted_for_each_shard_and_the_window_begins_with_the_first_answer(ledger):
    found = examined(ledger, [(1, 1)], [(1, 2)], [])
    assert found.rows.lost == [(1, 3), (2, 1)]
    assert found.rows.rpo_ms == pytest.approx((DISASTER - 3.1) * 1e3)
    counts = {name: (of.confirmed, of.recovered, of.lost) for name, of in found.shards.items()}
    assert counts == {"s0": (2, 1, 1), "s1": (1, 1, 0), "s2": (1, 0, 1)}
    found = examined(ledger, [(1, 1), (2, 1), (1, 4)], [(1, 2)], [(1, 3)])
    assert (found.rows.lost, found.rows.rpo_ms) == ([], 0)
    assert found.shards["s0"].recovered_unconfirmed == found.rows.recovered_unconfirmed == 1


def test_rows_that_must_break_are_those_behind_rows_that_the_backup_cannot_have(ledger):
    assert followed(ledger, {1}, since=1.9, until=9) == 1
    assert followed(ledger, {1}, since=2.1, until=9) == 0, "the row of before was asked for earlier"
    assert followed(ledger, {1}, since=1.9, until=4.2) == 0, "it is not answered yet"
    assert followed(ledger, {1, 2}, since=1.9, until=9) == 0, "both are on shards of which the backup has nothing"
    assert followed(ledger, {0}, since=0.5, until=9) == 1
