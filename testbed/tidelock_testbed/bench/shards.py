"""(r) Shard logs: lag of synthetic and PostgreSQL shards, commits with and without shipping, comebacks, recoveries."""

from __future__ import annotations

import time

from ..kvstore import KvStore
from ..progress import say
from . import shards_back, shards_pg
from .settings import Settings
from .shardsites import HOSTS, RTT_MS, SETTLE_S, lags_ms, read_entries, settled, sites, summary
from .spread import Spread

TOGETHER_EVERY_US = 10_000
APART_EVERY_US = 500
"""Between two entries of a shard, where shards write at times of their own."""
APART_SHARDS_MAX = 32


def measure(settings: Settings) -> dict:
    """One after the other, each on sites of its own."""
    return {
        "rtt_ms": RTT_MS,
        "synthetic": [row for count in settings.shard_counts for row in _synthetic(settings, count)],
        "comebacks": shards_back.comebacks(settings),
        "readiness": shards_back.readiness(settings),
        "postgres": shards_pg.measure_lag(settings),
        "promotion": shards_pg.measure_recovery(settings),
        "snapshots": shards_pg.measure_snapshots(settings),
    }


def _synthetic(settings: Settings, count: int) -> list[dict]:
    """Loads of one number of shards."""
    with sites(f"bench-shards-{count}") as of:
        host = HOSTS[0]
        store = KvStore(of.run, of.primary, host, of.memory / "kv", of.far(count), range(count), of.tls[host], True)
        store.wait_shipped()
        watch = of.watch(count)
        rtt_ms = of.rtt_ms()
        loads = {"together": TOGETHER_EVERY_US}
        if count <= APART_SHARDS_MAX:
            loads["apart"] = APART_EVERY_US
        rows = []
        for how, every_us in loads.items():
            turns = []
            for turn in range(settings.shard_rounds):
                path = of.run.directory / f"{how}-{turn}"
                store.say("load", how, settings.shard_load_s + SETTLE_S, every_us, path)
                store.hear(settings.shard_load_s + 60)
                time.sleep(0.3)
                turns.append(summary(lags_ms(settled(read_entries(path)), watch.read()), rtt_ms))
            row = {
                "shards": count,
                "how": how,
                "every_us": every_us,
                "rtt_ms": round(rtt_ms, 3),
                "turns": turns,
                "mean_ms": Spread.of([turn["mean_ms"] for turn in turns]).json(),
                "p99_ms": Spread.of([turn["p99_ms"] for turn in turns]).json(),
            }
            say(f"(r) {count} shards, {how}: {row['mean_ms']['median']:.2f} ms over half of {rtt_ms:.1f} ms")
            rows.append(row)
        return rows
