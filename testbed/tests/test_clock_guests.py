"""The clock guard on clocks of their own: two VMs, `ptp4l` in both, and real faults of real clocks.

Stamps are taken by software, in VMs that may have no KVM: half of the round trip is 0.6 to 1.5 ms, the offset jitters
by 1 ms, and ε is 1.4 to 5 ms. Up to 8 ms are believed, so that a step of 10 ms is told from jitter.
"""

from __future__ import annotations

import pytest

from tidelock_testbed.clockguest import LONG_S, ClockGuest, apart_ns
from tidelock_testbed.process import wait_until

MAX_NS = 8_000_000
SECOND_NS = 1_000_000_000
SETTINGS = [f"max-error-ns={MAX_NS}", "every-ms=250", "settle-ms=2000", "window-ms=10000"]


def believed(line: dict) -> bool:
    return line["verdict"] == "believed"


def not_believed(*whys: str):
    return lambda line: line["verdict"] == "not_believed" and line["why"] in whys


@pytest.fixture
def pair(run, image) -> tuple[ClockGuest, ClockGuest]:
    """A master, and a follower whose clock was a year and 40 ppm from the master's. It is believed."""
    master = ClockGuest(run, image, "master", 1, "2026-11-30T12:00:00")
    follower = ClockGuest(run, image, "follower", 2, "2025-11-30T12:00:00")
    master.set_frequency(40_000)
    assert apart_ns(master, follower)[1] < -300 * 86_400 * SECOND_NS
    master.start_ptp4l(follows=False)
    follower.start_ptp4l(follows=True)
    # The clocks are to give the reasons: a `ptp4l` that was stopped is not silent for too long.
    follower.start_clock_watch(*SETTINGS, "silence-max-ms=120000")
    line = follower.until("the follower's clock is believed", believed, 0)
    assert line["servo"] == "locked"
    assert abs(line["offset_ns"]) <= line["epsilon_ns"] <= MAX_NS
    low, high = apart_ns(master, follower)
    assert low - line["epsilon_ns"] <= 0 <= high + line["epsilon_ns"], "the clocks agree"
    return master, follower


def test_a_clock_that_is_stepped_is_not_believed_until_the_servo_has_it_back(pair):
    master, follower = pair
    for seconds in [0.01, -0.01, 3600, -3600]:
        follower.until("the clock is believed", believed)
        follower.step_clock(seconds)
        line = follower.next_look()
        # The reason is the step itself, or what it has done to the servo by now.
        assert not believed(line), line
        if "by_ns" in line:
            assert line["by_ns"] == pytest.approx(seconds * SECOND_NS, abs=MAX_NS)
        follower.until(f"the clock is believed after {seconds} s", believed)
        low, high = apart_ns(master, follower)
        assert low - MAX_NS <= 0 <= high + MAX_NS, "the clock is back"

    # The step alone is the reason while `ptp4l` does not see it.
    follower.signal_ptp4l("STOP")
    follower.step_clock(3600)
    line = follower.next_look()
    assert not_believed("clock_moved")(line), line
    assert line["by_ns"] == pytest.approx(3600 * SECOND_NS, abs=MAX_NS)
    follower.signal_ptp4l("CONT")
    follower.until("the clock is believed again", believed)


def test_a_clock_that_drifts_is_not_believed_for_long(pair):
    master, follower = pair
    follower.signal_ptp4l("STOP")
    follower.set_frequency(450_000)
    is_noticed = not_believed("above_max", "clock_moved")

    def moves(line):
        # The age of the last sample is not the whole reason: the clock is seen to go away from the raw clock.
        return line["bound"]["moved_ns"] > line["bound"]["drift_ns"]

    follower.until("the drift is noticed", lambda line: is_noticed(line) and moves(line))
    follower.signal_ptp4l("CONT")
    follower.until("the servo has the clock back", believed)

    # Nobody steers the clock any more, and its user says that it is certain.
    follower.signal_ptp4l("KILL")
    follower.set_frequency(40_000)
    follower.start_ptp4l(True, "--free_running", "1")
    follower.until("nobody steers the clock", not_believed("not_locked"))
    certain = 'pmc -u -b 0 -s /run/ptp4l -i /run/pmc "SET SYNCHRONIZATION_UNCERTAIN_NP 0" | grep "uncertain 0"'
    follower.do(f"until {certain}; do sleep 0.1; done")
    follower.until("the clock is believed as long as it goes well", believed)
    follower.set_frequency(-450_000)
    follower.until("the drift is noticed", lambda line: is_noticed(line) and (line["offset_ns"] or 0) < -MAX_NS / 4)


def test_a_master_that_is_stepped_is_noticed_by_the_clock_that_follows_it(pair):
    master, follower = pair
    master.step_clock(0.01)
    begin = len(follower.lines)
    follower.until("the small step is noticed", lambda line: not believed(line), begin)
    master.step_clock(-0.01)
    before = follower.until("the clock is believed again", believed)["contradictions"]

    master.step_clock(3600)
    follower.until("the step is noticed", lambda line: not believed(line))
    wait_until("the clock has followed", lambda: apart_ns(master, follower)[1] > -SECOND_NS, LONG_S)
    # The servo is locked again, and the offset small. But the time that went on by an hour is somebody's error.
    line = follower.until(
        "the servo is locked", lambda line: line["servo"] == "locked" and line.get("why") != "no_sample"
    )
    assert not_believed("clock_moved")(line), line
    assert line["by_ns"] == pytest.approx(3600 * SECOND_NS, abs=2 * MAX_NS)

    master.step_clock(-3600)
    line = follower.until("the clock is believed again, with the time of before", believed)
    assert line["contradictions"] == before + 1
