"""(o) It comes back: how long a guest waits when its daemon dies, and how quick a resync is beside others' commits.

Two groups of one host. One is killed and resynced; the other is in mode sync, so that its writes take as long as a
commit, and shares the daemon, the link and its bottleneck.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import threading
import time
from collections.abc import Iterator

from ..hostdaemon import GROUP, MEMBER, Protection, writer_of
from ..nbdwire import Connection
from ..process import Process, run_command, wait_until
from ..progress import say
from ..run import Run
from .fio import Workload, run_fio
from .images import disk_directory, filled_image, memory_directory
from .protected import BESIDE, DISK, Protected
from .settings import Settings
from .spread import Spread, ratio

RTT_MS = 50
RATE_MIB_PER_S = 32
"""Of the WAN, both ways, while sites are compared."""
QUEUE_MS = 50
"""What the bottleneck lets wait."""
BESIDE_MIB = 64
LIVE = Workload("4 KiB random write, QD 1", "randwrite", "4k", 1)
SERVED_S = 0.4
SERVED_WRITES = 500
SAMPLE_S = 0.02


class Guest(threading.Thread):
    """Writes 4 KiB, one after the other; when its server is gone it tries again each millisecond."""

    def __init__(self, socket, size_mib: int):
        super().__init__()
        self._socket, self._blocks = socket, size_mib * 256
        self._ended = threading.Event()
        self.completed: list[float] = []

    def run(self) -> None:
        """Until `end`."""
        chance, data = random.Random(1), random.randbytes(4096)
        while not self._ended.is_set():
            try:
                connection = Connection(self._socket, DISK)
            except OSError:
                time.sleep(0.001)
                continue
            try:
                while not self._ended.is_set():
                    connection.write(4096 * chance.randrange(self._blocks), data)
                    self.completed.append(time.monotonic())
            except OSError:
                pass
            connection.close()

    def end(self) -> None:
        """Returns when it has ended."""
        self._ended.set()
        self.join()

    def wait_served(self) -> None:
        """Until it is served again."""
        enough = len(self.completed) + SERVED_WRITES
        wait_until("the guest is served", lambda: len(self.completed) > enough, 60)

    def gap_since(self, at: float) -> float:
        """The longest that it has waited for a write since then, in seconds."""
        done = [at, *(done for done in self.completed if done > at)]
        return max(later - before for before, later in itertools.pairwise(done))


def measure(settings: Settings) -> dict:
    """Each on sites of its own: what a guest has touched is compared, too."""
    with _sites("bench-restarts", settings) as pair:
        restarts = _restarts(pair, settings)
    with _sites("bench-resyncs", settings) as pair:
        resyncs = [_resync(pair.run, pair, settings) for _ in range(settings.rounds)]
    return {
        "rtt_ms": RTT_MS,
        "link_mib_per_s": RATE_MIB_PER_S,
        "queue_ms": QUEUE_MS,
        "resynced_mib": settings.resynced_mib,
        "restarts": restarts,
        "resync_mib_per_s": Spread.of([one["mib_per_s"] for one in resyncs]).json(),
        "plain_mib_per_s": Spread.of([one["link_mib_per_s"] for one in resyncs]).json(),
        "resync_of_link": ratio(*([one[what] for one in resyncs] for what in ("mib_per_s", "link_mib_per_s"))).json(),
        "live_p50_ms": {
            when: Spread.of([one["live_us"][when] / 1e3 for one in resyncs]).json() for when in ("before", "meanwhile")
        },
        "live_ratio": ratio(*([one["live_us"][when] for one in resyncs] for when in ("meanwhile", "before"))).json(),
    }


@contextlib.contextmanager
def _sites(name: str, settings: Settings) -> Iterator[Protected]:
    with Run(name) as run:
        images = disk_directory(run)
        image = filled_image(images / "protected.img", settings.image_mib)
        beside = filled_image(images / "beside.img", BESIDE_MIB)
        backlog = Protection(backlog=f"{2 * settings.resynced_mib}MiB")
        pair = Protected(run, image, RTT_MS, images, memory_directory(run), backlog, beside)
        pair.wait_protected()
        yield pair


def _restarts(pair: Protected, settings: Settings) -> dict:
    """How long a guest waits."""
    guest = Guest(pair.daemon.runtime / GROUP / MEMBER / f"{DISK}.sock", settings.image_mib)
    guest.start()
    gaps: dict[str, list[float]] = {"killed": [], "stopped": []}
    try:
        for _ in range(settings.restarts):
            for how, gap in gaps.items():
                pair.wait_protected()
                time.sleep(SERVED_S)
                began = time.monotonic()
                pair.daemon.process.kill() if how == "killed" else pair.daemon.process.stop()
                pair.daemon.start()
                guest.wait_served()
                gap.append(1e3 * guest.gap_since(began))
    finally:
        guest.end()
    found = {how: Spread.of(gap).json() for how, gap in gaps.items()}
    say(f"(o) the guest's next write: {found['killed']['median']:.0f} ms after a kill -9 of the daemon")
    pair.wait_protected()
    pair.settle()
    return found


def _resync(run: Run, pair: Protected, settings: Settings) -> dict:
    """One: so much is written that the backup does not get, and the daemon dies with it."""
    small = Settings(quick=settings.quick, image_mib=BESIDE_MIB, fio_ramp_s=settings.fio_ramp_s)
    live = pair.daemon.uri(DISK, group=BESIDE, member=BESIDE)
    slow = {"rate_bytes_per_s": RATE_MIB_PER_S << 20, "queue_bytes": (RATE_MIB_PER_S << 20) * QUEUE_MS // 1000}
    pair.settle()
    pair.net.wan.set(**slow)
    link_mib_per_s = _link_rate(run, pair, settings)
    before = run_fio(run, live, LIVE, small, settings.live_s)
    pair.net.wan.cut()
    _write(pair, settings.resynced_mib)
    pair.daemon.process.kill()
    pair.net.wan.mend()
    pair.daemon.start()
    pair.daemon.wait_state("copying", 60, [pair.backup.process], name=GROUP)
    pair.daemon.wait_state("protected", 60, [pair.backup.process], name=BESIDE)
    samples: list[tuple[float, int, int]] = []
    watching = threading.Thread(target=_watch, args=(pair, samples))
    watching.start()
    meanwhile = run_fio(run, live, LIVE, small, settings.live_s)
    pair.wait_protected()
    watching.join()
    pair.net.wan.set(rate_bytes_per_s=0)
    mib_per_s = _middle_rate(samples)
    say(
        f"(o) resync at {mib_per_s:.1f} MiB/s, a plain stream at {link_mib_per_s:.1f}; "
        f"a commit beside takes {meanwhile.p50_us / 1e3:.1f} ms, before {before.p50_us / 1e3:.1f}"
    )
    return {
        "mib_per_s": mib_per_s,
        "link_mib_per_s": link_mib_per_s,
        "live_us": {"before": before.p50_us, "meanwhile": meanwhile.p50_us},
    }


def _link_rate(run: Run, pair: Protected, settings: Settings) -> float:
    """What one TCP stream gets of the link, in MiB/s."""
    port = "5201"
    server = Process(run, "iperf3", ["iperf3", "-s", "-1", "--forceflush", "-p", port], pair.net.backup.netns)
    wait_until("iperf3 listens", lambda: "listening" in server.log.read_text(), 30, [server])
    words = ["-c", pair.net.BACKUP4, "-p", port, "-t", str(settings.live_s), "-O", "1", "-J"]
    told = run_command(["iperf3", *words], "run iperf3", pair.net.primary.netns, settings.live_s + 60)
    server.wait(30)
    return json.loads(told)["end"]["sum_received"]["bits_per_second"] / 8 / (1 << 20)


def _write(pair: Protected, mib: int) -> None:
    connection = Connection(pair.daemon.runtime / GROUP / MEMBER / f"{DISK}.sock", DISK)
    data = random.randbytes(2 << 20)
    for number in range(mib):
        start = random.randrange(1 << 20)
        connection.write(number << 20, data[start : start + (1 << 20)])
    connection.close()


def _watch(pair: Protected, samples: list[tuple[float, int, int]]) -> None:
    """How far it is, until it is done."""
    while (copy := writer_of(pair.daemon.group(GROUP))["copy"]) is not None:
        samples.append((time.monotonic(), copy["done_bytes"], copy["total_bytes"]))
        time.sleep(SAMPLE_S)


def _middle_rate(samples: list[tuple[float, int, int]]) -> float:
    """MiB/s, without the beginning and the end."""
    total = samples[-1][2]
    middle = [(at, done) for at, done, _ in samples if 0.1 * total <= done <= 0.9 * total]
    (from_s, first), (to_s, last) = middle[0], middle[-1]
    return (last - first) / (to_s - from_s) / (1 << 20)
