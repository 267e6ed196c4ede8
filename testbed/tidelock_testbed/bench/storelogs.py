"""The section on shard logs."""

from __future__ import annotations

import textwrap
from pathlib import Path

SHARDS = """## (r) Shard logs

Stores whose shards are shipped by their own logs, over {rtt_ms} ms RTT; all data in memory. The lag of an entry begins
when it is committed at home, and ends when the store's watermark at the backup server has reached its stamp, as one
more host beside that server is told (`bench/shardsites.py`); half of the round trip that `ping` shows is taken off. TCP
is Reno: BBR paces a batch over milliseconds. The delay line runs before other programs.

*together*: a store (`daemon/library/examples/kv`) appends an entry to each of its shards every {together_ms:g} ms, all
with one stamp, as one that takes its requests in batches does. *apart*: each shard has an entry every {apart_ms:g} ms
at a time of its own, so that an entry also waits for the next one of every other shard: the watermark is the least of
all."""

POSTGRES = """Four PostgreSQL servers under pgbench, each commit a row, at a given rate. From the stamp of a commit on,
less the mean time of a COMMIT. The watermark waits for the next commit of each of the other servers: at random times,
{per_s} times a second, that is {wait_ms:.1f} ms in the mean for three of them."""

FULL = """At full speed, turns without `tidelockd` beside turns with it. Both sites and the WAN's program share this
machine's cores, so what is not waiting for a sync is taken from the servers."""

BACK = """A process is killed under load and started again at once: until a watermark of later than that is within 5 ms
of the usual age. A host of the synthetic store is leader and PSA in one process; the backup server is BSA and watermark
service. `tidelockd` is the PSA of the PostgreSQL shards, and has to believe its clock again first."""

READY = """A recovery under load, from the order at the control socket on. PostgreSQL: the standbys get their log up to
the final apply-to (*replayed*) and are promoted (*promoted*), the slowest of {shards}."""

COMPARED = """For comparison: clients that fetch the changes of the same servers from logical slots every {every_s:g} s,
over the same link, are {mean_ms:,.0f} ms behind a commit in the mean, half of the round trip included."""

STEPS = {"ready_ms": "replayed", "promoted_ms": "promoted", "answered_ms": "the answer to the order"}


def write(_directory: Path, result: dict) -> list[str]:
    """Part (r)."""
    every = {f"{how}_ms": _every(result, how) for how in ("together", "apart")}
    lines = [*SHARDS.format(rtt_ms=result["rtt_ms"], **every).splitlines(), ""]
    lines += ["| shards | | mean, ms | median | 99 % |", "|---|---|---|---|---|"]
    for row in result["synthetic"]:
        tail = f"{_middle(row, 'p50_ms'):.2f} | {row['p99_ms']['median']:.2f}"
        lines.append(f"| {row['shards']} | {row['how']} | {_spread(row['mean_ms'], 2)} | {tail} |")
    postgres, promotion = result["postgres"], result["promotion"]
    fastest = max(rate["per_s"] for rate in postgres["rates"])
    wait_ms = 1e3 / fastest * (1 + 1 / 2 + 1 / 3)
    lines += ["", *POSTGRES.format(per_s=f"{fastest:,}", wait_ms=wait_ms).splitlines(), ""]
    lines += ["| commits/s of each | mean, ms | a COMMIT, ms |", "|---|---|---|"]
    for rate in postgres["rates"]:
        commit_ms = f"{_middle(rate, 'commit_ms'):.2f}"
        lines.append(f"| {rate['per_s']:,} | {_spread(rate['mean_ms'], 2)} | {commit_ms} |")
    lines += ["", *FULL.splitlines(), "", "| data | clients | without, commits/s | with | with / without |"]
    lines += ["|---|---|---|---|---|"]
    for where, commits in (("on disk", postgres["commits"]), ("in memory", postgres["commits_in_memory"])):
        figures = " | ".join(_spread(commits[how], 0) for how in ("without", "with"))
        lines.append(f"| {where} | {commits['clients']} | {figures} | ×{_spread(commits['ratio'], 2)} |")
    lines += ["", *BACK.splitlines(), "", "| killed | steady again after, s | greatest age of the watermark, ms |"]
    lines += ["|---|---|---|"]
    for what, found in {**result["comebacks"], "`tidelockd`": postgres["daemon_killed"]}.items():
        worst = max(turn["worst_ms"] for turn in found["turns"])
        lines.append(f"| {what} | {_spread(found['back_s'], 2)} | {worst:,.0f} |")
    ready = result["readiness"]
    lines += ["", *READY.format(shards=promotion["shards"]).splitlines(), "", "| | ms |", "|---|---|"]
    lines.append(f"| {ready['shards']} synthetic shards: final apply-to | {_spread(ready['ready_ms'], 1)} |")
    for what, name in STEPS.items():
        lines.append(f"| {promotion['shards']} PostgreSQL shards: {name} | {_spread(promotion[what], 0)} |")
    return [*lines, "", *textwrap.wrap(" ".join(COMPARED.format(**result["snapshots"]).split()), 118), ""]


def _middle(row: dict, key: str) -> float:
    values = sorted(turn[key] for turn in row["turns"])
    return values[len(values) // 2]


def _every(result: dict, how: str) -> float:
    return next((row["every_us"] / 1e3 for row in result["synthetic"] if row["how"] == how), 0.0)


def _spread(spread: dict, digits: int) -> str:
    low, middle, high = (f"{spread[name]:,.{digits}f}" for name in ("min", "median", "max"))
    return f"{middle} ({low} to {high})"
