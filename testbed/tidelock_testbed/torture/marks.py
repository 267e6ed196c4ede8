"""Points in time of a tortured disk: bookmarks whose content is known, and drills on them (rules 5 and 7).

A bookmark that is set while the guest holds still has the bytes of the guest's own disk at that moment: they are kept,
and every view and every export of it must be these. One that is set while the guest writes has everything that had
completed before and nothing that was begun after it: what the first view shows is judged by the oracle and kept, and is
what it has to be from then on. So each of them is an independent replay of the past up to its point.

Invariant: what is looked at is never looked at in the way that it was kept.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .. import nbdwire
from ..oracle import BLOCK, Oracle
from ..pair import DISK, GROUP, LONG_S, MEMBER, MIB, Pair
from ..paths import BIN
from ..process import run_command, wait_until
from ..progress import say
from .verdict import Verdict

NAME = f"{MEMBER}.{DISK}"
"""The disk's name at the backup."""
FOREIGN = b"\xee" * BLOCK
"""What a drill writes: no guest ever does."""
DRILL_CHUNKS = 4
PAUSE_S = LONG_S / 3
"""C does not stand still for so long for any other reason."""
MARKS_MAX = 6
"""The oldest is not asked for any more when there are more."""
SHORT_WINDOW = "2s"
"""Everything but what is pinned is out of it by the time that it is asked for."""


@dataclass
class Mark:
    """A bookmark or a pin, and what is known of its point."""

    name: str
    content: Path
    """What its disk has: an image."""


class Marks:
    """The points in time of one pair's group."""

    def __init__(self, pair: Pair, oracle: Oracle, verdict: Verdict, chance: random.Random):
        self.pair, self.oracle, self.verdict, self.chance = pair, oracle, verdict, chance
        self.known: list[Mark] = []
        self._laps = 0

    @property
    def pins(self) -> bool:
        """Whether a bookmark would leave the window before it is asked for."""
        return self.pair.options.window == SHORT_WINDOW

    def bookmark(self) -> str | None:
        """Sets one at the primary; returns the name of a point that stays. None if it could not be set."""
        self._laps += 1
        name = f"mark-{self._laps}"
        words = [BIN / "tidelock", "bookmark", GROUP, name, "--timeout", "2s", "--json"]
        try:
            said = run_command([*words, "--socket", self.pair.control_socket], "set a bookmark")
        except RuntimeError:  # the backup is away, or the daemon; it may be set later, and nobody asks for it
            return None
        without = json.loads(said)["bookmark"]["without"]
        self.verdict.check(5, not without, f"the bookmark {name} is without {without}")
        if not self.pins:
            return name
        try:
            self.pair.backup_command("pin", GROUP, f"{name}-pin", "--at", f"bookmark:{name}")
        except RuntimeError:  # it has left the window
            return None
        return f"{name}-pin"

    def set_while_writing(self) -> int | None:
        """While the guest writes. Returns up to where the point has everything that the oracle knows."""
        before = self.oracle.position()
        name = self.bookmark()
        after = self.oracle.position()
        if not name:
            return None
        image = self.look_at(name)
        if image:
            lacks = self.oracle.violations_of_prefix(image, at_least=before)
            self.verdict.check(5, not lacks, f"{len(lacks)} blocks at {name} are no state up to it: {lacks[:3]}")
            is_later = self.oracle.has_later_than(image, after)
            self.verdict.check(5, not is_later, f"at {name} there is something that was written later")
            self._keep(Mark(name, image))
        return before

    def set_while_still(self) -> None:
        """While the guest holds still and both sites have everything: the point has what its own disk has."""
        position = self.oracle.position()
        content = self._new_image("disk")
        content.write_bytes(self.pair.local_content())
        name = self.bookmark()
        assert self.oracle.position() == position, "the guest was to hold still"
        if name:
            self._keep(Mark(name, content))
            self.check(self.known[-1])

    def _keep(self, mark: Mark) -> None:
        self.known.append(mark)
        if len(self.known) > MARKS_MAX:
            oldest = self.known.pop(0)
            oldest.content.unlink()
            if self.pins:
                self.pair.backup_command("pin", GROUP, oldest.name, "--remove")

    def forget_all(self) -> None:
        """The backup may have none of them any more."""
        for mark in self.known:
            mark.content.unlink()
        self.known.clear()

    def check_all(self) -> None:
        """Every point is what it was."""
        for mark in self.known:
            self.check(mark)

    def check(self, mark: Mark) -> None:
        """This one is."""
        image = self.look_at(mark.name)
        if image:
            differs = different(mark.content.read_bytes(), image.read_bytes())
            self.verdict.check(5, not differs, f"at {mark.name} there is something else than before: {differs}")
            image.unlink()

    def _window_was_shortened(self) -> bool:
        """Whether the backup's disk was full: then bookmarks go with the window, and only pins stay."""
        logs = self.pair.run.directory.glob("*backup*.log")
        return any("the window is shortened" in log.read_text(errors="replace") for log in logs)

    def look_at(self, name: str) -> Path | None:
        """The disk as it was, by a view or an export. None, and a violation, if there is none."""
        image = self._new_image("past")
        try:
            if self.chance.random() < 0.5:
                self.pair.backup_command("export", GROUP, NAME, image, "--at", f"bookmark:{name}")
            else:
                with View(self.pair, name, self._view_name()) as view:
                    image.write_bytes(view.content())
        except (RuntimeError, OSError) as error:
            if not self.pins and "there is no bookmark" in str(error) and self._window_was_shortened():
                return None
            self.verdict.check(5, False, f"{name} cannot be looked at: {error}")
            image.unlink(missing_ok=True)
            return None
        return image

    def _new_image(self, what: str) -> Path:
        self._laps += 1
        return self.pair.directory / f"{what}-{self._laps}.img"

    def _view_name(self) -> str:
        self._laps += 1
        return f"view-of-{self._laps}"

    # -- drills --------------------------------------------------------------------------------------------------------

    def drill(self, work: Callable[[float], None]) -> None:
        """A view is written to while the guest writes on: what it writes arrives meanwhile, and the past stays.

        Whether the group's own disk has stayed as it was is for whoever compares the sites, or recovers the group.
        """
        mark = self.chance.choice(self.known) if self.known else None
        if mark is None:
            return
        say(f"a drill on {mark.name}")
        marks = self._marks()
        vanishes = self.chance.random() < 0.3
        try:
            with View(self.pair, mark.name, self._view_name(), writable=True) as view:
                for _ in range(DRILL_CHUNKS):
                    self._write_some(view)
                    self.check_goes_on(work)
                if vanishes:
                    self.verdict.bitten("kill -9: of a backup during a drill")
                    self.pair.backup.kill()
                    self.pair.start_backup()
                    view.is_open = False
        except (RuntimeError, OSError) as error:
            self.verdict.check(7, False, f"a drill on {mark.name} failed: {error}")
            return
        self.check(mark)
        now = self._marks()
        self.verdict.check(7, now == marks, f"a drill has changed the history: {marks}, now {now}")

    def _write_some(self, view: View) -> None:
        guest = nbdwire.Connection(view.socket, NAME)
        blocks = self.chance.sample(range(self.oracle.blocks), 32)
        for block in blocks:
            guest.write(block * BLOCK, FOREIGN)
        guest.flush()
        lost = [block for block in blocks if guest.read(block * BLOCK, BLOCK) != FOREIGN]
        self.verdict.check(7, not lost, f"a drill does not find what it wrote into the blocks {lost}")
        guest.close()

    def check_goes_on(self, work: Callable[[float], None]) -> None:
        """What the guest writes from now on is acknowledged by the backup, and becomes a part of its cut."""
        before = self.cut()

        def has_risen() -> bool:
            work(0.02)
            return self.cut() > before

        try:
            wait_until("C rises", has_risen, PAUSE_S, [self.pair.daemon, self.pair.backup], every_s=0)
        except TimeoutError as error:
            self.verdict.check(7, False, f"replication pauses for a view: C stays at {before}\n{error}")
            return
        self.verdict.check(7, True, "")

    def cut(self) -> int:
        """C, as the backup has it."""
        return self.pair.backup_group()["writers"][0]["committed"]

    def _marks(self) -> list[tuple]:
        """What the backup says of all that has a name."""
        lists = [self.pair.backup_command(kind, GROUP, "--list", "--json") for kind in ("bookmark", "pin")]
        every = [mark for one in lists for mark in json.loads(one)["marks"]]
        # A bookmark leaves the window by itself.
        every = [mark for mark in every if mark["kind"] == "pin" or not self.pins]
        return sorted((mark["name"], mark["at"]["hlc"], mark["lost"]) for mark in every)


class View:
    """A view of a point, open in the server as long as it is a context."""

    def __init__(self, pair: Pair, mark: str, name: str, writable: bool = False):
        self.pair, self.mark, self.name, self.writable = pair, mark, name, writable
        self.is_open = False

    def __enter__(self) -> View:
        words = ["--at", f"bookmark:{self.mark}", "--detach", "--json", "--name", self.name]
        words += ["--write", "--quota", "32MiB"] if self.writable else []
        said = json.loads(self.pair.backup_command("view", GROUP, *words))
        self.socket = Path(said["disks"][0]["socket"])
        self.size_bytes = said["disks"][0]["size_bytes"]
        self.is_open = True
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_open:
            self.pair.backup_command("view", "--close", self.name)

    def content(self) -> bytes:
        """All of it."""
        disk = nbdwire.Connection(self.socket, NAME)
        content = b"".join(disk.read(at, MIB) for at in range(0, self.size_bytes, MIB))
        disk.close()
        return content


def different(one: bytes, other: bytes) -> str:
    """Where two images differ, for people; nothing if they do not."""
    if one == other:
        return ""
    places = range(0, max(len(one), len(other)), BLOCK)
    at = [place // BLOCK for place in places if one[place : place + BLOCK] != other[place : place + BLOCK]]
    return f"{len(at)} blocks, the first of them {at[:5]}"
