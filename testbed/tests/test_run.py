"""Nothing of a run stays behind, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tidelock_testbed.paths import ROOT
from tidelock_testbed.process import wait_until
from tidelock_testbed.run import reap_dead_runs, start_time

PROGRAM = textwrap.dedent("""
    import sys, time
    from tidelock_testbed.net import Net
    from tidelock_testbed.process import Process
    from tidelock_testbed.run import Run
    with Run(sys.argv[1]) as run:
        net = Net(run)
        child = Process(run, "child", ["sleep", "1000"], net.primary.netns)
        run.remove_at_close(sys.argv[2] + "/*mine*")
        print(run.prefix, child.pid, run.sockets, flush=True)
        time.sleep(1000)
""")


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_a_run_that_is_stopped_leaves_nothing(run, number, tmp_path):
    for name in ("this-is-mine-1", "this-is-not"):
        (tmp_path / name).touch()
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, f"{run.directory.relative_to(ROOT / 'out')}/inner", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "testbed")},
        # A test run in the background of a script has SIGINT ignored, and its children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    prefix, pid, sockets = child.stdout.readline().split()
    started = start_time(int(pid))
    assert f"{prefix}-primary" in namespaces()
    child.send_signal(number)
    assert child.wait(30) != 0
    if number == signal.SIGKILL:
        assert f"{prefix}-primary" in namespaces()
        reap_dead_runs()
    assert prefix not in namespaces()
    assert not Path(sockets).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["this-is-not"]
    wait_until("the child is gone", lambda: start_time(int(pid)) != started, 5)


def test_the_machine_outside_is_not_changed(run):
    def outside() -> list[str]:
        commands = [
            "ip -br addr",
            "ip route",
            "ip -6 route show default",
            "sysctl -a -r (forward|tcp_[rw]mem)",
            "iptables-save -t filter",
        ]
        outputs = [subprocess.run(command.split(), capture_output=True, text=True).stdout for command in commands]
        # Comments carry the time of day.
        return [line for output in outputs for line in output.splitlines() if not line.startswith("#")]

    from tidelock_testbed.net import GuestNet, Net

    before = outside()
    net = Net(run, rtt_ms=5)
    net.primary.add_tap(GuestNet(0))
    assert outside() == before


MOUNTS = textwrap.dedent("""
    import sys
    from pathlib import Path
    from tidelock_testbed import run
    run._BPF_LOCK = Path(sys.argv[1])
    pinned = run._BPF / "tidelock"
    def look(): print("tidelock /sys/fs/bpf bpf" in Path("/proc/mounts").read_text())
    first, second = (run.Run(f"{sys.argv[2]}/{name}", keep=False) for name in ("first", "second"))
    first.close()
    look()
    pinned.mkdir()
    second.close()
    look()
    pinned.rmdir()
    run.Run(f"{sys.argv[2]}/third", keep=False).close()
    look()
""")


def test_the_last_run_takes_away_what_daemons_have_mounted_and_nobody_uses(run, tmp_path):
    inside = 'umount /sys/fs/bpf 2> /dev/null; mount -t bpf tidelock /sys/fs/bpf && exec "$@"'
    program = [sys.executable, "-c", MOUNTS, tmp_path / "lock", f"{run.directory.relative_to(ROOT / 'out')}"]
    found = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", inside, "-", *program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "testbed")},
    )
    assert found.stdout.split() == ["True", "True", "False"], found.stderr
