"""A recovered VM is the server's: its terminal may be left, hung up or made non-blocking, and is as it was
afterwards."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import termios

import pytest

from tidelock_testbed.pair import GROUP, MEMBER, Pair
from tidelock_testbed.paths import BIN
from tidelock_testbed.process import wait_until
from tidelock_testbed.run import kill_group, start_time

LEAVE = b"\x1d"


class Terminal:
    """A terminal with a command in it."""

    def __init__(self, pair: Pair, *words: str):
        self.ours, self.theirs = pty.openpty()
        self.before = termios.tcgetattr(self.theirs)
        argv = [str(BIN / "tidelock-backup"), *words, "--config", str(pair.backup_config)]
        self.command = subprocess.Popen(
            argv,
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.set_blocking(self.ours, False)
        self.said = b""

    def hears(self, text: str) -> bool:
        """Whether it has said this by now."""
        try:
            self.said += os.read(self.ours, 65536)
        except BlockingIOError:
            pass
        return text.encode() in self.said

    def wait_for(self, text: str) -> None:
        """Waits until it says this."""
        try:
            wait_until(f"the terminal says {text!r}", lambda: self.hears(text), 120)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.said.decode(errors='replace')}") from None

    def type(self, keys: bytes) -> None:
        """As an operator does."""
        os.write(self.ours, keys)

    def ends(self) -> int:
        """Waits for the command's end. The terminal must be as it was."""
        status = self.command.wait(60)
        assert termios.tcgetattr(self.theirs) == self.before
        assert "panicked" not in self.said.decode(errors="replace")
        return status

    def close(self) -> None:
        """Whatever happened."""
        if self.command.poll() is None:
            self.command.kill()
            self.command.wait()
        for end in (self.ours, self.theirs):
            os.close(end)


@pytest.fixture
def recovered(run):
    """A recovered VM without a system on its disk, and the terminal that it was recovered in."""
    pair = Pair(run)
    for directory in (run.sockets, run.directory, pair.directory):
        directory.chmod(0o711)  # QEMU is another user
    machine = pair.directory / "machine.json"
    machine.write_text(json.dumps({"memory_mib": 64}))
    text = pair.host_config.read_text()
    pair.host_config.write_text(text.replace('roles = ["writer"]\n', f'roles = ["writer"]\nmachine = "{machine}"\n'))
    pair.start()
    pair.wait_state("protected")
    pair.daemon.kill()
    words = ["--primary-is-dead", "--although-connected", "--boot", "--accelerator", "tcg"]
    terminal = Terminal(pair, "recover", GROUP, *words)
    terminal.wait_for("Boot db as this? Type yes:")
    assert "memory 64 MiB" in terminal.said.decode()
    terminal.type(b"yes\n")
    terminal.wait_for("Ctrl-] leaves it")
    pid = the_machine(pair)["handle"]["process"]["pid"]
    started = start_time(pid)
    run.note(pid=pid, start=started)
    yield pair, terminal
    terminal.close()
    if start_time(pid) == started:
        kill_group(pid)


def the_machine(pair: Pair) -> dict:
    """The one that runs."""
    return json.loads(pair.backup_command("machine", "list", "--json"))["machines"][0]


def test_leaving_a_hangup_and_a_non_blocking_terminal_end_no_machine(recovered):
    pair, terminal = recovered
    machine = the_machine(pair)

    # Ctrl-C is the guest's.
    terminal.type(b"\x03")
    terminal.type(LEAVE)
    terminal.wait_for("db goes on")
    assert terminal.ends() == 0
    assert the_machine(pair) == machine

    hung_up = Terminal(pair, "machine", "attach", GROUP, MEMBER)
    hung_up.wait_for("Ctrl-] leaves it")
    hung_up.command.send_signal(signal.SIGHUP)
    hung_up.ends()
    hung_up.close()
    assert the_machine(pair) == machine

    non_blocking = Terminal(pair, "machine", "attach", GROUP, MEMBER)
    non_blocking.wait_for("Ctrl-] leaves it")
    os.set_blocking(non_blocking.theirs, False)
    non_blocking.type(b"x")
    non_blocking.type(LEAVE)
    non_blocking.wait_for("db goes on")
    assert non_blocking.ends() == 0
    non_blocking.close()
    assert the_machine(pair) == machine

    closed = Terminal(pair, "machine", "attach", GROUP, MEMBER)
    closed.wait_for("Ctrl-] leaves it")
    os.close(closed.theirs)
    os.close(closed.ours)
    closed.command.wait(60)
    assert the_machine(pair) == machine

    # The server starts again, and still has it.
    pair.backup.kill()
    pair.start_backup()
    assert the_machine(pair) == machine
    pair.backup_command("machine", "stop", GROUP, "--now")
    assert json.loads(pair.backup_command("machine", "list", "--json"))["machines"] == []


def test_a_description_that_would_run_a_program_is_refused_where_it_is_written(run):
    pair = Pair(run)
    machine = pair.directory / "machine.json"
    machine.write_text(json.dumps({"memory_mib": 16, "extra_arguments": ["-incoming", "exec:id"]}))
    text = pair.host_config.read_text()
    pair.host_config.write_text(text.replace('roles = ["writer"]\n', f'roles = ["writer"]\nmachine = "{machine}"\n'))
    pair.start_backup()
    pair.start_daemon(wait=False)
    assert pair.daemon.wait(60) == 1
    assert "`extra_arguments` is for the backup site to say" in pair.daemon.log.read_text()
