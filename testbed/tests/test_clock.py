"""The clock guard on real `ptp4l`s: two of them over a cable, of which the example `clock-watch` follows the second."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tidelock_testbed.netns import Netns, add_addresses, veth
from tidelock_testbed.paths import BIN
from tidelock_testbed.process import Process, wait_until

LONG_S = 120

CONFIG = """[global]
uds_address {socket}
time_stamping software
# Both namespaces have one clock, which is nobody's to steer.
free_running 1
pi_integral_const 0.3
logAnnounceInterval -2
logSyncInterval -2
logMinDelayReqInterval -2
priority1 {priority}
clockAccuracy 0x25
slaveOnly {follows}
"""


class Ptp:
    """An end of the cable, and its `ptp4l`."""

    def __init__(self, run, name: str, number: int, follows: bool):
        self.run, self.name = run, name
        self.netns = Netns(run, name)
        self.socket = run.sockets / name
        self.config = run.directory / f"{name}.conf"
        self.config.write_text(CONFIG.format(socket=self.socket, priority=100 + number, follows=int(follows)))
        self.follows = follows

    def start(self) -> None:
        """Starts `ptp4l` on the cable."""
        argv = ["ptp4l", "-f", self.config, "-i", "ptp", "-m", "-q"]
        self.process = Process(self.run, f"ptp4l-{self.name}", argv, self.netns)
        if self.follows:
            # A clock that runs free counts as locked when its user says that it is certain.
            self.declare_uncertain(0)

    def declare_uncertain(self, value: int) -> None:
        """Sets what `ptp4l` believes of a clock that runs free; waits until it has heard."""
        argv = ["pmc", "-u", "-b", "0", "-s", self.socket, "-i", self.run.sockets / "pmc"]
        argv.append(f"SET SYNCHRONIZATION_UNCERTAIN_NP {value}")

        def heard():
            # `pmc` ends without an answer, too. A socket that a killed `ptp4l` has left answers nobody.
            done = subprocess.run(argv, capture_output=True, text=True, timeout=LONG_S, check=False)
            return f"uncertain {value}" in done.stdout

        wait_until("ptp4l has heard of the clock", heard, LONG_S, [self.process])


class Watch:
    """`clock-watch`, and the last status that it printed."""

    def __init__(self, run, socket: Path):
        self.lines: list[dict] = []
        words = ["max-error-ns=20000000", "every-ms=100", "silence-max-ms=2000", "settle-ms=1000"]
        argv = [BIN / "examples" / "clock-watch", "ptp4l", socket, *words]
        env = {"TMPDIR": str(run.sockets)}
        self.process = Process(run, "clock-watch", argv, on_line=self._hear, env=env)

    def _hear(self, _at: float, line: str) -> None:
        if line.startswith("{"):
            self.lines.append(json.loads(line))

    def until(self, what: str, condition) -> dict:
        """Waits for a line, printed from now on, of which the condition is true; returns it."""
        begin = len(self.lines)

        def found():
            return next((line for line in self.lines[begin:] if condition(line)), None)

        return wait_until(what, found, LONG_S, [self.process])


def believed(line: dict) -> bool:
    return line["verdict"] == "believed"


def not_believed(*whys: str):
    return lambda line: line["verdict"] == "not_believed" and (not whys or line["why"] in whys)


def cable(run) -> tuple[Ptp, Ptp]:
    master, follower = Ptp(run, "master", 1, follows=False), Ptp(run, "follower", 2, follows=True)
    veth(master.netns, "ptp", follower.netns, "ptp")
    add_addresses(master.netns, "ptp", "10.77.90.1/24")
    add_addresses(follower.netns, "ptp", "10.77.90.2/24")
    return master, follower


def test_a_clock_is_believed_as_long_as_ptp4l_has_a_master(run):
    master, follower = cable(run)
    watch = Watch(run, follower.socket)
    watch.until("nobody has answered", not_believed("no_answer_yet"))

    follower.start()
    watch.until("there is no master", not_believed("no_master"))

    master.start()
    line = watch.until("the clock is believed", believed)
    assert line["servo"] == "locked"
    assert line["epsilon_ns"] <= 20_000_000
    # The clocks are one: the offset that is measured is an error of the measurement, and within the bound.
    assert abs(line["offset_ns"]) <= line["epsilon_ns"]
    assert line["bound"]["grandmaster_ns"] == 10_000
    grandmaster = line["master"]

    master.process.kill()
    watch.until("the master's death is noticed", not_believed("no_master", "not_locked", "above_max"))
    master.start()
    line = watch.until("the clock is believed again", believed)
    assert line["master"] == grandmaster


def test_a_ptp4l_that_is_killed_or_started_again_is_noticed_and_found(run):
    master, follower = cable(run)
    master.start()
    follower.start()
    watch = Watch(run, follower.socket)
    watch.until("the clock is believed", believed)

    follower.process.kill()
    watch.until("ptp4l is gone", lambda line: not_believed("source_gone")(line) and line["servo"] == "gone")
    follower.start()
    watch.until("the new ptp4l is found", believed)

    # No word that the clock is certain: nobody steers it.
    follower.declare_uncertain(1)
    watch.until("the servo is not locked", not_believed("not_locked"))
