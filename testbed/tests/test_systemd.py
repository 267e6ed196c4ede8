"""Both programs as systemd runs them: readiness, reload, and the exit status of a start that cannot succeed."""

from __future__ import annotations

import signal
import socket

import pytest

from tidelock_testbed.nbdwire import Connection
from tidelock_testbed.pair import DISK, LONG_S, Options, Pair
from tidelock_testbed.process import Process, wait_until


@pytest.fixture
def notified(run) -> socket.socket:
    """The socket that systemd listens on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(run.sockets / "notify"))
        notify.settimeout(LONG_S)
        yield notify


def test_a_unit_is_ready_when_its_sockets_accept_and_says_when_it_stops(run, notified):
    pair = Pair(run, Options(disk_mib=8))
    environment = {"NOTIFY_SOCKET": notified.getsockname()}
    pair.backup_environment = pair.daemon_environment = environment
    pair.start_backup()
    assert notified.recv(100) == b"READY=1\n"
    pair.start_daemon(wait=False)
    assert notified.recv(100) == b"READY=1\n"
    Connection(pair.socket, DISK, timeout_s=LONG_S).close()
    pair.wait_state("protected")
    for process in (pair.daemon, pair.backup):
        process.signal(signal.SIGTERM)
        assert notified.recv(100) == b"STOPPING=1\n"
        assert process.wait(LONG_S) == 0


def test_a_reload_changes_the_log_level_and_a_mistake_in_the_file_changes_nothing(run):
    pair = Pair(run, Options(disk_mib=8))
    pair.start()
    sides = [(pair.daemon, pair.host_config, "[host]\n"), (pair.backup, pair.backup_config, "[server]\n")]
    for process, path, section in sides:
        good = path.read_text()
        reload(
            process, path, good.replace(section, section + 'log = "trace"\n'), "log level and certificates are as in"
        )
        pair.status()
        pair.backup_status()
        wait_until("more is logged", lambda p=process: "TRACE " in p.log.read_text(), LONG_S, [process])
        reload(process, path, good + "[no-such-section]\n", "the configuration stays as it was")
        path.write_text(good)
    pair.wait_state("protected")
    pair.backup_status()


def test_missing_certificates_are_told_at_a_reload(run):
    pair = Pair(run, Options(disk_mib=8))
    pair.start()
    for process, directory, told in [
        (pair.daemon, "host-tls", "the next connection to the backup will fail"),
        (pair.backup, "backup-tls", "no host can connect with these certificates"),
    ]:
        for key in (pair.directory / directory).glob("*.key"):
            key.rename(key.with_suffix(".away"))
        process.signal(signal.SIGHUP)
        wait_until("the mistake is told", lambda p=process, t=told: t in p.log.read_text(), LONG_S, [process])
        assert process.alive()


def test_a_start_that_needs_a_corrected_file_is_not_tried_again(run):
    """RestartPreventExitStatus=2 in both units."""
    pair = Pair(run, Options(disk_mib=8))
    pair.start()
    pair.daemon.signal(signal.SIGTERM)
    assert pair.daemon.wait(LONG_S) == 0
    pair.state_file.write_text("{")
    pair.start_daemon(wait=False)
    assert pair.daemon.wait(LONG_S) == 2
    pair.backup.signal(signal.SIGTERM)
    assert pair.backup.wait(LONG_S) == 0
    pair.backup_config.unlink()
    words = [pair.backup_programs / "tidelock-backup", "serve", "--config", pair.backup_config]
    assert Process(run, "no-file", words).wait(LONG_S) == 2


def reload(process: Process, path, text: str, told: str) -> None:
    """Changes the file and sends SIGHUP; the process says `told` and goes on."""
    path.write_text(text)
    process.signal(signal.SIGHUP)
    wait_until(f"{process.name} has read its file again", lambda: told in process.log.read_text(), LONG_S, [process])
    assert process.alive()
