"""(r), continued: how soon the lag is steady again after a kill, and how soon a store is ready after a disaster."""

from __future__ import annotations

import json
import socket
import time
from statistics import median

from ..kvstore import KvStore
from ..progress import say
from .settings import Settings
from .shardsites import HOSTS, STORE, Sites, sites
from .spread import Spread

SHARDS = 8
LOAD_EVERY_US = 2_000
STEADY_MORE_MS = 5
"""The store is back when its lag is within this of the steady one."""
BEFORE_S, AFTER_S = 2.0, 4.0


def instant_lags(marks: list[tuple[int, int]]) -> list[tuple[int, float]]:
    """When a watermark was heard, and how old its stamp was, in milliseconds."""
    found = []
    for at, stamp in marks:
        ms, rest = stamp >> 16, stamp & 0xFFFF
        found.append((at, at / 1e6 - ms - rest / 65536))
    return found


def back_after(marks: list[tuple[int, int]], killed_ns: int, detected_ns: int) -> dict:
    """How long after `detected_ns` a watermark of later than that is as young as they were before the kill."""
    lags = instant_lags(marks)
    steady = median([lag for at, lag in lags if killed_ns - 1e9 <= at < killed_ns])
    worst = 0.0
    for at, lag in lags:
        if at > killed_ns:
            worst = max(worst, lag)
        # Watermarks that were under way at the kill do not count.
        if at / 1e6 - lag > detected_ns / 1e6 and lag <= steady + STEADY_MORE_MS:
            found = {"steady_ms": steady, "worst_ms": worst}
            return {**{what: round(ms, 2) for what, ms in found.items()}, "back_s": round((at - detected_ns) / 1e9, 3)}
    raise RuntimeError("the lag did not become steady again")


class TwoHosts:
    """A store whose shards two hosts lead, half of them each."""

    def __init__(self, of: Sites):
        self.of = of
        half = SHARDS // 2
        self.hosts = [
            KvStore(
                of.run,
                of.primary,
                host,
                of.memory / host,
                of.far(SHARDS),
                range(nth * half, (nth + 1) * half),
                of.tls[host],
            )
            for nth, host in enumerate(HOSTS)
        ]
        for host in self.hosts:
            host.wait_shipped()

    def load(self, host: KvStore, seconds: float) -> None:
        """Writes for a while, and does not wait for the end of it."""
        host.say("load", "together", seconds, LOAD_EVERY_US, self.of.run.directory / f"load-{host.name}")


def comebacks(settings: Settings) -> dict:
    """A host of the store is killed, and so is the backup server; each is started again at once."""
    found: dict[str, list[dict]] = {"leader and PSA": [], "BSA and watermark service": []}
    for _ in range(settings.shard_rounds):
        for what, turns in found.items():
            with sites("bench-shards-back") as of:
                store, watch = TwoHosts(of), of.watch(SHARDS)
                for host in store.hosts:
                    store.load(host, BEFORE_S + AFTER_S)
                time.sleep(BEFORE_S)
                killed_ns = time.time_ns()
                if what == "leader and PSA":
                    store.hosts[1].process.kill()
                    detected_ns = time.time_ns()
                    store.hosts[1].start()
                    store.load(store.hosts[1], AFTER_S)
                else:
                    of.server.process.kill()
                    detected_ns = time.time_ns()
                    of.server.start()
                time.sleep(AFTER_S - 1)
                turns.append(back_after(watch.read(), killed_ns, detected_ns))
                say(f"(r) {what} killed: back after {turns[-1]['back_s']:.2f} s")
    return {what: {"turns": turns, "back_s": _spread(turns, "back_s")} for what, turns in found.items()}


def _spread(turns: list[dict], key: str) -> dict:
    return Spread.of([turn[key] for turn in turns]).json()


def recover(of: Sites) -> tuple[float, dict]:
    """Orders the recovery; returns the milliseconds from the order to the answer, and the answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
        control.settimeout(120)
        control.connect(str(of.server.control_socket))
        order = {"do": "recover", "group": STORE, "primary_is_dead": True}
        lines = control.makefile()
        began = time.monotonic()
        control.sendall(json.dumps(order).encode() + b"\n")
        answer = json.loads(lines.readline())
        return 1e3 * (time.monotonic() - began), answer


def readiness(settings: Settings) -> dict:
    """A disaster while the shards write: from the order to the final watermark, every log closed, apply-to final."""
    times = []
    for _ in range(settings.shard_rounds):
        with sites("bench-shards-recover") as of:
            store = TwoHosts(of)
            for host in store.hosts:
                store.load(host, BEFORE_S)
            time.sleep(BEFORE_S / 2)
            took_ms, answer = recover(of)
            if answer.get("is") != "recoveredstore":
                raise RuntimeError(f"the store was not recovered: {answer}")
            times.append(took_ms)
    say(f"(r) ready {Spread.of(times).median:.1f} ms after the order")
    return {"shards": SHARDS, "ready_ms": Spread.of(times).json()}
