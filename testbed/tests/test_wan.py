"""The emulated WAN gives what it is asked for, measured with ping and iperf3.

These tests are about the emulator. Where load on the machine can only make a figure worse in one direction, the bound
on that side is wide; the other side is what the emulator guarantees.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess

import pytest

from tidelock_testbed.net import Net
from tidelock_testbed.netns import Netns
from tidelock_testbed.process import Process, run_command, wait_until
from tidelock_testbed.wan import Wan, WanParams, has_netem, netem_words


def ping_ms(net: Net, address: str, count: int = 20, interval_s: float = 0.05) -> list[float]:
    text = run_command(["ping", "-n", "-c", count, "-i", interval_s, "-W", "5", address], "ping", net.primary.netns)
    return [float(ms) for ms in re.findall(r"time=([\d.]+) ms", text)]


def iperf3(net: Net, *options: str) -> dict:
    """Bits per second and the like, from the primary site to the backup site."""
    server = Process(net.run, "iperf3-server", ["iperf3", "-s", "-1", "--forceflush"], net.backup.netns)
    wait_until("iperf3 listens", lambda: "Server listening" in server.log.read_text(), 10, [server])
    text = run_command(["iperf3", "-J", "-c", net.BACKUP4, *options], "measure", net.primary.netns, timeout_s=60)
    server.kill()
    server.log.unlink()
    return json.loads(text)["end"]


@pytest.mark.parametrize("address", [Net.BACKUP4, Net.BACKUP6])
def test_round_trip_takes_what_was_asked(run, address):
    net = Net(run, rtt_ms=50)
    ping_ms(net, address, count=2)  # neighbour discovery has its own round trip
    times = ping_ms(net, address)
    assert len(times) == 20
    # The least of them: the rest is this machine's.
    assert 50 <= min(times) < 250
    net.wan.set(delay_ms=5)
    times = ping_ms(net, address)
    assert 10 <= min(times) < 50


def test_jitter_stays_within_its_bounds_and_is_there(run):
    net = Net(run, wan=WanParams(delay_ms=20, jitter_ms=10))
    times = ping_ms(net, net.BACKUP4, count=60, interval_s=0.02)
    assert 20 <= min(times) < 60
    assert statistics.pstdev(times) > 1


def test_rate_is_a_ceiling_that_is_reached(run):
    net = Net(run, wan=WanParams(delay_ms=2, rate_bytes_per_s=5e6))
    result = iperf3(net, "-t", "3", "-O", "1")
    bytes_per_s = result["sum_received"]["bits_per_second"] / 8
    assert bytes_per_s < 5.2e6  # iperf3's own clock and the queue that empties
    assert bytes_per_s > 1e6


def test_one_flow_fills_the_long_fat_pipe(run):
    net = Net(run, rtt_ms=50)
    result = iperf3(net, "-t", "4", "-O", "2")
    # A window of 64 KiB would let 10 Mbit/s through.
    assert result["sum_received"]["bits_per_second"] > 50e6
    assert net.wan.stats()["left_to_right"]["dropped"] == 0


def test_datagrams_come_in_the_number_and_size_in_which_they_were_sent(run):
    net = Net(run, rtt_ms=10)
    result = iperf3(net, "-u", "-b", "20M", "-t", "1", "-l", "1200")
    assert result["sum"]["packets"] > 100
    assert result["sum"]["lost_packets"] == 0


def closed_cable(run, left: Netns, right: Netns, seed: int, number: int) -> Wan:
    """A delay line that nothing but our own packets enters: no IPv6, no ARP, so the dice fall for them alone."""
    wan = Wan(run, left, right, seed=seed, interface=f"line{number}", netem=False)
    ends = [(left, f"10.78.{number}.1"), (right, f"10.78.{number}.2")]
    for end, address in ends:
        end.sysctl({f"net.ipv6.conf.{wan.interface}.disable_ipv6": 1})
        end.ip(f"addr add {address}/24 dev {wan.interface}")
    for (end, _), (other, address) in (ends, ends[::-1]):
        mac = json.loads(other.ip(f"-j link show {wan.interface}"))[0]["address"]
        end.ip(f"neigh replace {address} lladdr {mac} dev {wan.interface} nud permanent")
    return wan


def test_loss_and_duplicates_are_counted_exactly_and_decided_by_the_seed(run):
    left, right = Netns(run, "left"), Netns(run, "right")
    fates = []
    for number, seed in enumerate((1, 1, 2)):
        wan = closed_cable(run, left, right, seed, number)
        before = wan.stats()
        wan.set(loss=0.2, duplicate=0.1)
        done = subprocess.run(
            left.enter(["ping", "-n", "-q", "-c", "200", "-i", "0.002", "-W", "1", f"10.78.{number}.2"]),
            capture_output=True,
            text=True,
        )
        assert "200 packets transmitted" in done.stdout, done.stdout + done.stderr
        there, back = (
            {name: report[name] - before[way][name] for name in report} for way, report in wan.stats().items()
        )
        assert there["frames_in"] == 200
        assert there["frames_out"] == 200 - there["lost"] + there["duplicated"]
        assert back["frames_in"] == there["frames_out"]
        assert 10 < there["lost"] < 90
        fates.append((there["lost"], there["duplicated"], back["lost"], back["duplicated"]))
    assert fates[0] == fates[1]
    assert fates[0] != fates[2]


def test_a_cut_stops_everything_and_mending_brings_it_back(run):
    net = Net(run, rtt_ms=10)
    assert len(ping_ms(net, net.BACKUP4, count=2)) == 2
    net.wan.cut()
    done = subprocess.run(
        net.primary.netns.enter(["ping", "-n", "-c", "5", "-i", "0.05", "-W", "1", net.BACKUP4]),
        capture_output=True,
        text=True,
    )
    assert "100% packet loss" in done.stdout
    assert net.wan.stats()["left_to_right"]["dropped"] >= 5
    net.wan.mend()
    assert len(ping_ms(net, net.BACKUP4, count=3)) == 3


def test_netem_gets_the_same_parameters():
    words = " ".join(
        netem_words(WanParams(delay_ms=25, jitter_ms=2, rate_bytes_per_s=1e6, loss=0.01, duplicate=0.02, corrupt=0.03))
    )
    assert words == "netem limit 4194 delay 25ms 2ms loss random 1.0% duplicate 2.0% corrupt 3.0% rate 8000000bit"
    assert "loss random 100%" in " ".join(netem_words(WanParams(cut=True)))


def test_the_wan_says_which_kind_it_is(run):
    net = Net(run)
    assert net.wan.kind == ("netem" if has_netem() else "tidelock-wan")
