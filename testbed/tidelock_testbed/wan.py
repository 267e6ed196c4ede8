"""The WAN between two namespaces: `tc netem` where the kernel has it, else the testbed's own delay line.

Both take the same parameters and both say which one they are. One difference is theirs: when the
cable is cut, the delay line loses what was on its way and netem lets it arrive; both happen in real networks.
"""

from __future__ import annotations

import json
import socket
import subprocess
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .netns import Netns, veth
from .paths import BIN
from .process import Process, wait_until
from .run import Run


@dataclass(frozen=True)
class WanParams:
    """What the WAN does to frames in each direction. Zero means "not at all"."""

    delay_ms: float = 0
    """One way: half of the round trip."""
    jitter_ms: float = 0
    rate_bytes_per_s: float = 0
    queue_bytes: int = 4 << 20
    """What may wait before the bottleneck."""
    loss: float = 0
    duplicate: float = 0
    corrupt: float = 0
    """The share of frames of which a bit arrives wrong."""
    reorder: bool = False
    """Whether jitter may change the order of frames. netem's always may."""
    cut: bool = False


def has_netem() -> bool:
    """Whether this kernel has `sch_netem`: tried in a namespace that is gone afterwards."""
    script = "ip link set lo up && tc qdisc add dev lo root netem delay 1ms"
    return subprocess.run(["unshare", "--net", "sh", "-c", script], capture_output=True).returncode == 0


class Wan:
    """A cable between interface `wan` of one namespace and interface `wan` of another."""

    def __init__(
        self,
        run: Run,
        left: Netns,
        right: Netns,
        params: WanParams = WanParams(),
        seed: int = 1,
        netem: bool | None = None,
        interface: str = "wan",
    ):
        netem = has_netem() if netem is None else netem
        self.kind = "netem" if netem else "tidelock-wan"
        self.interface = interface
        self.params = params
        kind = _Netem if netem else _DelayLine
        self._cable = kind(run, left, right, interface, seed)
        self._cable.set(params)

    @property
    def process(self) -> Process | None:
        """The program that delays the frames, where the kernel does not."""
        return getattr(self._cable, "process", None)

    def set(self, **changes: object) -> None:
        """Changes parameters, named as in `WanParams`; in force on return."""
        self.params = replace(self.params, **changes)
        self._cable.set(self.params)

    def cut(self) -> None:
        """Nothing passes from now on."""
        self.set(cut=True)

    def mend(self) -> None:
        """Undoes `cut`."""
        self.set(cut=False)

    def stats(self) -> dict:
        """Counters of both directions, `left_to_right` and `right_to_left`: at least `frames_out` and `dropped`."""
        return self._cable.stats()


class _DelayLine:
    def __init__(self, run: Run, left: Netns, right: Netns, interface: str, seed: int):
        self.socket: Path = run.sockets / f"{interface}.ctl"
        self.process = Process(
            run,
            interface,
            [
                BIN / "tidelock-wan",
                "run",
                "--left",
                f"{left.name}:{interface}",
                "--right",
                f"{right.name}:{interface}",
                "--control",
                self.socket,
                "--seed",
                seed,
            ],
        )
        wait_until("the delay line is ready", lambda: "\nready" in self.process.log.read_text(), 10, [self.process])
        for end in (left, right):
            end.ip(f"link set {interface} txqueuelen 10000 up")

    def set(self, params: WanParams) -> None:
        self._ask({"set": asdict(params)})

    def stats(self) -> dict:
        stats = {}
        for direction, report in self._ask({"stats": True}).items():
            counters = report["counters"]
            counters["dropped"] = sum(
                counters[name] for name in ("lost", "dropped_queue", "dropped_cut", "dropped_memory")
            )
            stats[direction] = counters
        return stats

    def _ask(self, request: dict) -> dict:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
            control.settimeout(10)
            control.connect(str(self.socket))
            control.sendall(json.dumps(request).encode() + b"\n")
            answer = json.loads(control.makefile().readline())
        if "error" in answer:
            raise RuntimeError(f"tidelock-wan refused {request}: {answer['error']}")
        return answer


class _Netem:
    def __init__(self, run: Run, left: Netns, right: Netns, interface: str, seed: int):
        del run, seed  # nothing to clean up beyond the namespaces; netem takes no seed before Linux 6.6
        self.ends = {"left_to_right": left, "right_to_left": right}
        self.interface = interface
        veth(left, interface, right, interface)

    def set(self, params: WanParams) -> None:
        for end in self.ends.values():
            done = subprocess.run(
                ["tc", "-n", end.name, "qdisc", "replace", "dev", self.interface, "root", *netem_words(params)],
                capture_output=True,
                text=True,
            )
            if done.returncode != 0:
                raise RuntimeError(f"tc netem {params}: {done.stderr.strip()}")

    def stats(self) -> dict:
        stats = {}
        for direction, end in self.ends.items():
            text = subprocess.run(
                ["tc", "-n", end.name, "-s", "-j", "qdisc", "show", "dev", self.interface],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            root = next(row for row in json.loads(text) if row.get("root"))
            stats[direction] = {"frames_out": root["packets"], "bytes_out": root["bytes"], "dropped": root["drops"]}
        return stats


def netem_words(params: WanParams) -> list[str]:
    """The parameters as `tc` wants them."""
    # netem counts packets, not bytes: enough of them for the queue and for what travels.
    words = ["netem", "limit", str(max(1000, params.queue_bytes // 1000 if params.rate_bytes_per_s else 1_000_000))]
    words += ["delay", f"{params.delay_ms}ms"]
    if params.jitter_ms:
        words += [f"{params.jitter_ms}ms"]
    loss = 1 if params.cut else params.loss
    if loss:
        words += ["loss", "random", f"{loss * 100}%"]
    if params.duplicate:
        words += ["duplicate", f"{params.duplicate * 100}%"]
    if params.corrupt:
        words += ["corrupt", f"{params.corrupt * 100}%"]
    if params.rate_bytes_per_s:
        words += ["rate", f"{int(params.rate_bytes_per_s * 8)}bit"]
    return words
