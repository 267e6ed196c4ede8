"""One run of the testbed: its name, its directory, and the certainty that nothing of it stays behind.

Everything that outlives a Python object (a process, a network namespace, a temporary directory) is
written down in `out/.runs/` before it is made and undone when the run is closed: at its end, at an exception, at
Ctrl-C or SIGTERM. A run that was killed with SIGKILL is undone by the next run that starts.

Invariant: a process is ended only if its number and its start time are those that were written down,
so a number that the kernel has given to someone else is never touched.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from .paths import OUT

_RECORDS = OUT / ".runs"
_BPF = Path("/sys/fs/bpf")
_OF_THE_KERNEL = {"maps.debug", "progs.debug"}
_BPF_LOCK = Path("/run/tidelock-testbed.lock")
_open_runs: list["Run"] = []


class Run:
    """Owns what a run makes. Use it as a context manager, or call `close`.

    `directory` (in `out/`) gets logs and artefacts; it is kept unless the run went well and `keep` is false.
    `sockets` is a short path for Unix sockets, whose names may have 107 bytes only.
    """

    def __init__(self, name: str, keep: bool = True):
        handle_signals()
        reap_dead_runs()
        self.prefix = _free_prefix()
        self.keep = keep
        self._runs_with_others = _BPF_LOCK.open("w")
        fcntl.flock(self._runs_with_others, fcntl.LOCK_SH)
        self.directory = OUT / name
        if self.directory.exists():
            shutil.rmtree(self.directory)
        self.directory.mkdir(parents=True)
        self._undo: list[tuple[str, Callable[[], None]]] = []
        self._record = _RECORDS / f"{self.prefix}.jsonl"
        self._record.touch()
        self.sockets = Path(tempfile.mkdtemp(prefix=f"{self.prefix}-"))
        self.note(directory=str(self.sockets))
        self.on_close(f"remove {self.sockets}", lambda: shutil.rmtree(self.sockets, ignore_errors=True))
        _open_runs.append(self)

    def note(self, **what: object) -> None:
        """Writes down something that must be undone even if this program is killed."""
        with self._record.open("a") as record:
            record.write(json.dumps(what) + "\n")

    def on_close(self, name: str, undo: Callable[[], None]) -> None:
        """Calls `undo` when the run is closed; what was made last is undone first."""
        self._undo.append((name, undo))

    def remove_at_close(self, pattern: str) -> None:
        """Removes files that others will make for this run, by a pattern for their names."""
        self.note(files=pattern)
        self.on_close(f"remove {pattern}", lambda: _remove_files(pattern))

    def close(self, well: bool = True) -> None:
        """Undoes everything. One step that fails does not keep the others from being done."""
        if self not in _open_runs:
            return
        before = [(number, signal.signal(number, signal.SIG_IGN)) for number in _STOPPING]
        try:
            while self._undo:
                name, undo = self._undo.pop()
                try:
                    undo()
                except Exception:  # the rest must still be undone
                    print(f"testbed: cannot {name}:", file=sys.stderr)
                    traceback.print_exc()
            _open_runs.remove(self)
            self._unmount_if_last()
            self._record.unlink(missing_ok=True)
            if well and not self.keep:
                shutil.rmtree(self.directory, ignore_errors=True)
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def _unmount_if_last(self) -> None:
        """A daemon mounts a file system for what must outlive it, where there is none, and leaves it there. It
        goes when no other run may be about to use it, and nobody has anything in it."""
        with self._runs_with_others as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return
            is_ours = f"tidelock {_BPF} bpf " in Path("/proc/mounts").read_text()
            if is_ours and {path.name for path in _BPF.iterdir()} <= _OF_THE_KERNEL:
                subprocess.run(["umount", _BPF], capture_output=True)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close(well=kind is None)


def start_time(pid: int) -> int | None:
    """When a process was started, in the kernel's ticks: with its number, what identifies it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def reap_dead_runs() -> None:
    """Undoes what runs left behind that were killed before they could do so themselves."""
    _RECORDS.mkdir(parents=True, exist_ok=True)
    for record in _RECORDS.glob("tl*.jsonl"):
        owner = int(record.stem[2:].partition("x")[0])
        # A run notes its own start time first; an owner that is alive is left alone even before that.
        notes = [json.loads(line) for line in record.read_text().splitlines() if line.endswith("}")]
        started = next((note["owner_start"] for note in notes if "owner_start" in note), None)
        if start_time(owner) is not None and started in (None, start_time(owner)):
            continue
        for note in reversed(notes):
            _undo_note(note)
        record.unlink(missing_ok=True)


def _undo_note(note: dict) -> None:
    if "pid" in note and start_time(note["pid"]) == note["start"]:
        kill_group(note["pid"])
    if "netns" in note:
        subprocess.run(["ip", "netns", "delete", note["netns"]], capture_output=True)
    if "directory" in note:
        shutil.rmtree(note["directory"], ignore_errors=True)
    if "files" in note:
        _remove_files(note["files"])


def _remove_files(pattern: str) -> None:
    """Removes files by a pattern for their names, and their directory if it is empty then."""
    directory, _, names = pattern.rpartition("/")
    for path in Path(directory).glob(names):
        path.unlink(missing_ok=True)
    try:
        Path(directory).rmdir()
    except OSError:  # not there, or others have files in it
        pass


def kill_group(pid: int) -> None:
    """Kills a process that leads its own group, and the group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def handle_signals() -> None:
    """Makes SIGTERM and SIGHUP end the program the way Ctrl-C does: through `finally` and `with`."""

    def stop(number, _frame):
        raise KeyboardInterrupt(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, stop)


def _free_prefix() -> str:
    """`tl<pid>` or, for further runs of the same process, `tl<pid>x<n>`."""
    n = 0
    while True:
        prefix = f"tl{os.getpid()}" + (f"x{n}" if n else "")
        try:
            with (_RECORDS / f"{prefix}.jsonl").open("x") as record:
                record.write(json.dumps({"owner_start": start_time(os.getpid())}) + "\n")
            return prefix
        except FileExistsError:
            n += 1


@atexit.register
def _close_open_runs() -> None:
    for run in list(_open_runs):
        run.close(well=False)
