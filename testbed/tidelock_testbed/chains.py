"""Causal chains over the shards of a store, and what is left of them after a recovery.

Row n of a chain is asked for on one shard when row n - 1 was answered by another. So whatever a recovery brings back of
a chain must be its first rows, up to some row, and none behind it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .ledger import Ledger, Row, Verdict, compare


@dataclass(frozen=True)
class ShardVerdict:
    """Counts of the rows of one shard."""

    confirmed: int
    recovered: int
    lost: int
    recovered_unconfirmed: int


@dataclass(frozen=True)
class ChainsVerdict:
    """Comparison of a ledger with the rows of all recovered shards."""

    rows: Verdict
    """Verdict on all shards together, as if they were one database."""
    shards: dict[str, ShardVerdict]
    broken: list[Row]
    """Rows whose predecessor in their chain is not there: never allowed at a consistent cut."""
    strange: list[Row]
    """Rows that nobody asked for, at a shard of which nobody asked for them, or there more than once: damage."""
    chains: int
    """Chains of which something is there."""


def examine(ledger: Ledger, shards: dict[str, list[Row]], disaster_at: float) -> ChainsVerdict:
    """Compares what clients were told before the disaster with the rows that each shard has, in the shards' order."""
    count = Counter(row for rows in shards.values() for row in rows)
    there = set(count)
    strange = {row for row in there if count[row] > 1 or row not in ledger.sent}
    of_shards = {}
    for number, (name, rows) in enumerate(shards.items()):
        strange |= {row for row in rows if ledger.where.get(row) != number}
        confirmed = {row for row in ledger.confirmed if ledger.where[row] == number}
        of_shards[name] = ShardVerdict(
            confirmed=len(confirmed),
            recovered=len(rows),
            lost=len(confirmed - set(rows)),
            recovered_unconfirmed=len(set(rows) - confirmed),
        )
    return ChainsVerdict(
        rows=compare(ledger, there, disaster_at),
        shards=of_shards,
        broken=sorted((chain, n) for chain, n in there if n > 1 and (chain, n - 1) not in there),
        strange=sorted(strange),
        chains=len({chain for chain, _ in there}),
    )


def followed(ledger: Ledger, first: set[int], since: float, until: float) -> int:
    """Number of rows that would be there without their predecessor if the backup had nothing of some shards since a
    time: the predecessor was asked of one of them since then, the row itself of another shard, and answered before
    `until`."""
    found = 0
    for (chain, n), at in ledger.confirmed.items():
        before = (chain, n - 1)
        found += (
            at < until
            and ledger.where[chain, n] not in first
            and ledger.sent.get(before, 0) > since
            and ledger.where[before] in first
        )
    return found
