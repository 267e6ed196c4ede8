"""The past of a busy disk, shown in three ways: a view, a chain of QEMU's overlays, and reflinked copies on btrfs.

Both others have a state for each link of the chain only, made after the fact; a view can be of any instant between.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from ..pair import DISK, GROUP, MEMBER, Options, Pair
from ..process import Process, run_command, wait_until
from ..progress import say
from ..run import Run
from .fio import Workload, run_fio
from .settings import Settings
from .spread import Spread, ratio

READS = [
    Workload("4 KiB random read, QD 1", "randread", "4k", 1),
    Workload("4 KiB random read, QD 32", "randread", "4k", 32),
    Workload("1 MiB sequential read, QD 4", "read", "1m", 4),
]
BUSY = Workload("4 KiB random write, QD 32", "randwrite", "4k", 32)
BUSY_IOPS = 2000
DEPTH = 6
"""Links of the chain, over the whole time that the disk was busy."""
NAME = f"{MEMBER}.{DISK}"
PEERS = {"chain": "qcow2 chain", "reflink": "btrfs reflink"}
LISTENS_S = 30
WHOLE_DISKS_S = 600


@dataclass(frozen=True)
class States:
    """The same disk at the same instants, as images that QEMU serves."""

    points: list[int]
    """Milliseconds since 1970; the last is the latest."""
    chain: list[Path]
    reflink: Path

    def serve(self, run: Run, peer: str, sockets: list[Path]) -> Process:
        """The last state, through the page cache, as views read."""
        image, kind = {"chain": (self.chain[-1], "qcow2"), "reflink": (self.reflink, "raw")}[peer]
        sockets.append(run.sockets / f"{peer}-{len(sockets)}.nbd")
        words = ["qemu-nbd", "--socket", sockets[-1], "--export-name", "disk", "--format", kind, "--read-only"]
        server = Process(run, f"qemu-nbd-{peer}", [*words, "--persistent", "--shared=16", image])
        wait_until("qemu-nbd listens", sockets[-1].exists, LISTENS_S, [server])
        return server


def measure(run: Run, settings: Settings) -> dict:
    """Makes a disk busy, and then looks back."""
    pair = Pair(run, Options(disk_mib=settings.image_mib, window="2h"))
    pair.start()
    pair.wait_settled()
    began_ms = int(time.time() * 1000)
    uri = f"nbd+unix:///{DISK}?socket={pair.socket}"
    run_fio(run, uri, BUSY, settings, settings.busy_s, BUSY_IOPS)
    pair.wait_settled()
    # Of the newest millisecond, more might still have come.
    latest_ms = json.loads(pair.backup_command("timeline", GROUP, "--json"))["newest"]["unix_ms"] - 1
    points = [began_ms + (latest_ms - began_ms) * n // DEPTH for n in range(DEPTH)] + [latest_ms]
    chain = _chain(run, pair, points)
    states = States(points, chain, _reflinked(run, pair, points, settings))
    busy = {"workload": BUSY.name, "iops": BUSY_IOPS, "seconds": settings.busy_s, "disk_mib": settings.image_mib}
    return {
        "busy": busy,
        "opening": _opening(run, pair, states, settings),
        **_reads(run, pair, states, settings),
        "rolling": _rolling(pair, settings, latest_ms),
        "commit": _commit(states),
    }


def _at(ms: int) -> str:
    return f"hlc:{ms}.65535"


def _chain(run: Run, pair: Pair, points: list[int]) -> list[Path]:
    """A qcow2 image for each point, on the one before."""
    words = [word for ms in points for word in ("--chain", _at(ms))]
    out = run.directory / "chain.qcow2"
    words += ["--format", "qcow2", "--json"]
    made = pair.backup_command("export", GROUP, NAME, out, *words, timeout_s=WHOLE_DISKS_S)
    return [Path(image["file"]) for image in json.loads(made)["images"]]


def _reflinked(run: Run, pair: Pair, points: list[int], settings: Settings) -> Path:
    """A raw image for each point, on a btrfs of its own: a reflink of the one before, and what was written since."""
    volume, mounted = run.directory / "btrfs.img", run.directory / "btrfs"
    mounted.mkdir()
    with volume.open("wb") as file:
        file.truncate((settings.image_mib * 4 + 1024) << 20)
    # In the mount namespace of a process that only keeps it: the mount and its loop device end with the process.
    keep = f"mkfs.btrfs -q {volume} && mount -o loop,noatime {volume} {mounted} && echo mounted && exec sleep infinity"
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", keep]
    keeper = Process(run, "btrfs", words)
    wait_until("btrfs is mounted", lambda: "\nmounted" in keeper.log.read_text(), LISTENS_S, [keeper])
    inside = Path(f"/proc/{keeper.pid}/root{mounted}")
    images = [inside / f"{number}.img" for number in range(len(points))]
    pair.backup_command("export", GROUP, NAME, images[0], "--at", _at(points[0]), timeout_s=WHOLE_DISKS_S)
    increment = run.directory / "increment"
    for number in range(1, len(points)):
        run_command(["cp", "--reflink=always", images[number - 1], images[number]], "reflink an image")
        between = (_at(points[number - 1]), _at(points[number]))
        words = ("diff", GROUP, *between, "--disk", NAME, "--output", increment)
        pair.backup_command(*words, timeout_s=WHOLE_DISKS_S)
        pair.backup_command("apply", increment, images[number], timeout_s=WHOLE_DISKS_S)
        increment.unlink()
    return images[-1]


def _first_read(uri: str) -> None:
    """By a program that starts for it, as a user's would."""
    run_command(["qemu-io", "--read-only", "-f", "raw", "-c", "read 0 4k", uri], "read through NBD")


def _opening(run: Run, pair: Pair, states: States, settings: Settings) -> dict:
    """Seconds from the command until its first 4 KiB are read."""
    seconds: dict[str, list[float]] = {"view": [], **{peer: [] for peer in PEERS}}
    sockets: list[Path] = []
    for _ in range(max(settings.rounds, 5)):
        began = time.monotonic()
        view = _view(pair, states.points[-1])
        _first_read(view["disks"][0]["uri"])
        seconds["view"].append(time.monotonic() - began)
        pair.backup_command("view", "--close", view["name"])
        for peer in PEERS:
            began = time.monotonic()
            server = states.serve(run, peer, sockets)
            _first_read(_uri(sockets[-1]))
            seconds[peer].append(time.monotonic() - began)
            server.stop()
    return {what: Spread.of(values).json() for what, values in seconds.items()}


def _view(pair: Pair, ms: int) -> dict:
    return json.loads(pair.backup_command("view", GROUP, "--at", _at(ms), "--detach", "--json"))


def _uri(socket: Path) -> str:
    return f"nbd+unix:///disk?socket={socket}"


def _reads(run: Run, pair: Pair, states: States, settings: Settings) -> dict:
    view = _view(pair, states.points[-1])
    before_mib = resident_mib(pair.backup)
    sockets: list[Path] = []
    servers = {peer: states.serve(run, peer, sockets) for peer in PEERS}
    uris = {"view": view["disks"][0]["uri"], **dict(zip(PEERS, map(_uri, sockets), strict=True))}
    iops: dict[tuple[str, str], list[float]] = {}
    for _ in range(settings.rounds):
        for workload in READS:
            for server, uri in uris.items():
                turn = run_fio(run, uri, workload, settings)
                iops.setdefault((workload.name, server), []).append(turn.iops)
    memory = {"view": resident_mib(pair.backup) - before_mib}
    memory |= {peer: resident_mib(server) for peer, server in servers.items()}
    for server in servers.values():
        server.stop()
    pair.backup_command("view", "--close", view["name"])
    rows = []
    for workload in READS:
        of = {server: iops[workload.name, server] for server in uris}
        row = {
            "workload": workload.name,
            "iops": {server: Spread.of(values).json() for server, values in of.items()},
            "ratio": {peer: ratio(of["view"], of[peer]).json() for peer in PEERS},
        }
        told = ", ".join(f"x{row['ratio'][peer]['median']:.2f} of a {name}" for peer, name in PEERS.items())
        say(f"(n) {workload.name}: {told}")
        rows.append(row)
    return {"reads": rows, "memory_mib": {what: round(mib, 1) for what, mib in memory.items()}}


def resident_mib(process: Process) -> float:
    """What of a process is in memory."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def _rolling(pair: Pair, settings: Settings, latest_ms: int) -> list[dict]:
    """Back by each span and forward again: a view, and a snapshot's images."""
    words = ("snapshot", GROUP, "rolled", "--at", _at(latest_ms), "--json")
    pair.backup_command(*words, timeout_s=WHOLE_DISKS_S)
    view = _view(pair, latest_ms)["name"]
    rows = []
    for span_s in settings.roll_spans_s:
        seconds: dict[str, list[float]] = {"view": [], "snapshot": []}
        written = 0
        for _ in range(settings.rounds):
            for ms in (latest_ms - span_s * 1000, latest_ms):
                began = time.monotonic()
                pair.backup_command("view", "--roll", view, "--to", _at(ms), "--json")
                seconds["view"].append(time.monotonic() - began)
                began = time.monotonic()
                words = ("snapshot", GROUP, "rolled", "--roll-to", _at(ms), "--json")
                told = json.loads(pair.backup_command(*words, timeout_s=WHOLE_DISKS_S))["snapshots"][0]
                seconds["snapshot"].append(time.monotonic() - began)
                written = told["written_bytes"]
        row = {
            "span_s": span_s,
            "written_mib": round(written / (1 << 20), 2),
            "seconds": {what: Spread.of(values).json() for what, values in seconds.items()},
        }
        say(f"(n) rolled by {span_s} s, {row['written_mib']} MiB: {row['seconds']['snapshot']['median']:.2f} s")
        rows.append(row)
    pair.backup_command("view", "--close", view)
    return rows


def _commit(states: States) -> dict:
    """How a chain forgets its oldest state: the first overlay is committed into the image below it."""
    overlay = states.chain[1]
    mib = overlay.stat().st_blocks * 512 / (1 << 20)
    began = time.monotonic()
    run_command(["qemu-img", "commit", "-q", overlay], "commit an overlay")
    seconds = time.monotonic() - began
    return {"overlay_mib": round(mib, 1), "mib_per_s": round(mib / seconds, 1)}
