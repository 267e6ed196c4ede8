"""Processes of a run: each in a session of its own, with a log file, ended by its number."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from .netns import Netns
from .run import Run, kill_group, start_time

_MACHINE_RUNS = re.compile(r" runs as QEMU's process (\d+)")


class Process:
    """A program that runs until it ends or the run does.

    Its output goes to `<run>/<name>.log`. With `on_line`, each line is also given to that function, on a
    thread of its own, with the time (CLOCK_MONOTONIC) at which it came.
    """

    def __init__(
        self,
        run: Run,
        name: str,
        argv: list,
        netns: Netns | None = None,
        env: dict[str, str] | None = None,
        on_line: Callable[[float, str], None] | None = None,
        stdin: int = subprocess.DEVNULL,
    ):
        self.name = name
        self.log = run.directory / f"{name}.log"
        words = [str(word) for word in (netns.enter(argv) if netns else argv)]
        with self.log.open("ab") as log:
            log.write(f"$ {' '.join(words)}\n".encode())
            log.flush()
            self.popen = subprocess.Popen(
                words,
                stdin=stdin,
                stdout=subprocess.PIPE if on_line else log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(env or {})},
            )
        run.note(pid=self.popen.pid, start=start_time(self.popen.pid))
        run.on_close(f"end {name}", self.kill)
        self._run = run
        self._machines: list[tuple[int, int]] = []
        self._reader = None
        if on_line:
            self._reader = threading.Thread(target=self._read, args=(on_line,), daemon=True, name=name)
            self._reader.start()

    def _read(self, on_line: Callable[[float, str], None]) -> None:
        with self.log.open("ab") as log:
            for line in self.popen.stdout:
                at = time.monotonic()
                log.write(f"{at:.4f} ".encode() + line)
                log.flush()
                text = line.decode(errors="replace").rstrip()
                self._hear_machine(text)
                on_line(at, text)

    @property
    def pid(self) -> int:
        """The number of the program itself, not of a wrapper."""
        return self.popen.pid

    def alive(self) -> bool:
        """Whether it still runs."""
        return self.popen.poll() is None

    def signal(self, number: int) -> None:
        """Sends a signal to the program alone. SIGSTOP has taken effect when this returns: a thread that was about to
        run may take a moment to notice, and do something in it."""
        self.popen.send_signal(number)
        if number == signal.SIGSTOP:
            wait_until("each thread has stopped", lambda: has_stopped(self.pid), 30, [self])

    def _hear_machine(self, line: str) -> None:
        """A VM that a backup server runs on this command's behalf lives and dies with it here."""
        found = _MACHINE_RUNS.search(line)
        started = start_time(int(found[1])) if found else None
        if started is not None:
            self._machines.append((int(found[1]), started))
            self._run.note(pid=int(found[1]), start=started)

    def kill_now(self) -> None:
        """Sends SIGKILL to it and to what it started, and does not wait."""
        for pid, started in self._machines:
            if start_time(pid) == started:
                kill_group(pid)
        if self.alive():
            kill_group(self.pid)

    def kill(self) -> None:
        """Ends it and what it started with SIGKILL, and waits until it is gone."""
        self.kill_now()
        self.popen.wait()
        self._end_reader()

    def stop(self, timeout_s: float = 30) -> int:
        """Asks it to end with SIGTERM; returns its exit status."""
        self.popen.terminate()
        return self.wait(timeout_s)

    def wait(self, timeout_s: float) -> int:
        """Waits for its end; returns its exit status, negative for a signal."""
        try:
            status = self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.name} still runs after {timeout_s:.0f} s\n{self.tail()}") from None
        self._end_reader()
        return status

    def _end_reader(self) -> None:
        if self._reader:
            self._reader.join(5)

    def tail(self, lines: int = 20) -> str:
        """The end of its log, for an error message."""
        text = self.log.read_text(errors="replace").splitlines()[-lines:]
        return f"--- end of {self.log}:\n" + "\n".join(text)


def kill_at_once(processes: list[Process]) -> None:
    """Sends SIGKILL to all of them before it waits for any: a power cut, not a shutdown."""
    for process in processes:
        process.kill_now()
    for process in processes:
        process.kill()


def runs(pid: int) -> bool:
    """True of a process that is more than an entry that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def has_stopped(pid: int) -> bool:
    """Whether each thread of a process stands still after SIGSTOP, or will before it leaves the kernel (D: its disk may
    hang)."""
    states = set()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has just ended
            states.add(stat.read_text().rpartition(")")[2].split()[0])
    return bool(states) and states <= {"T", "D"}


def wait_until(
    what: str, condition: Callable[[], object], timeout_s: float, needs: list[Process] = (), every_s: float = 0.02
):
    """Waits until `condition()` is true and returns its value; fails at once if a process that it needs ended."""
    end = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        for process in needs:
            if not process.alive():
                raise RuntimeError(
                    f"{process.name} ended (status {process.popen.returncode}) while waiting for: {what}"
                    f"\n{process.tail()}"
                )
        if time.monotonic() > end:
            tails = "\n".join(process.tail() for process in needs)
            raise TimeoutError(f"not within {timeout_s:.0f} s: {what}\n{tails}")
        time.sleep(every_s)


def run_command(argv: list, what: str, netns: Netns | None = None, timeout_s: float = 60) -> str:
    """Runs a short command to its end and returns its output; an error says what it was for."""
    words = [str(word) for word in (netns.enter(argv) if netns else argv)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise RuntimeError(f"cannot {what}: {' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout
