"""Both sites took writes, because somebody said that a primary is dead which was not: neither timeline is lost, what
differs between them is shown, and either can be what the group goes on with."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from test_faults_seed import DISK_MIB, NAME, copy_numbers, recovered_disk, written_image

from tidelock_testbed.nbdwire import Connection
from tidelock_testbed.net import Net
from tidelock_testbed.pair import DISK, GROUP, LONG_S, MIB, Options, Pair
from tidelock_testbed.process import wait_until

OLD_AT, NEW_AT = 40 * MIB, 48 * MIB
PIN = "seeded"


def told(pair: Pair, *words: object) -> dict:
    """What `tidelock-backup` says for programs."""
    return json.loads(pair.backup_command(*words, "--json"))


def shown(pair: Pair, when: str) -> tuple[bytes, bytes]:
    """What the disk has at both places, at a point in time."""
    view = told(pair, "view", GROUP, "--at", when, "--detach")
    disk = Connection(Path(view["disks"][0]["uri"].split("socket=")[1]), NAME)
    seen = disk.read(OLD_AT, MIB), disk.read(NEW_AT, MIB)
    disk.close()
    pair.backup_command("view", "--close", view["name"])
    return seen


class BothTookWrites:
    """The old site is cut off and goes on, the other one is made the primary by force and is written to. Then the old
    disk seeds a backup server at the old site, and the other site protects its disk to there."""

    def __init__(self, run):
        chance = random.Random("both")
        self.old, self.new = chance.randbytes(MIB), chance.randbytes(MIB)
        net = Net(run, rtt_ms=4)
        home = Pair(run, Options(disk=written_image(run)), net)
        home.start()
        guest = Connection(home.socket, DISK)
        self.before = guest.read(OLD_AT, MIB), guest.read(NEW_AT, MIB)
        home.wait_settled()
        net.wan.cut()
        home.backup_command("recover", GROUP, "--primary-is-dead")
        guest.write(OLD_AT, self.old)
        guest.flush()
        guest.close()
        there = recovered_disk(home)
        there.write(NEW_AT, self.new)
        there.flush()
        there.close()
        net.wan.mend()
        home.wait_state("fenced")
        home.daemon.stop()
        self.back = Pair(run, Options(disk=home.export()), name="back")
        self.back.start_backup()
        seeded = told(self.back, "seed", GROUP, f"{NAME}={home.disk}", "--move")
        assert seeded["pin"] == PIN
        self.back.start_daemon()
        self.back.wait_state("protected")

    @property
    def one(self) -> tuple[bytes, bytes]:
        """The old site's."""
        return self.old, self.before[1]

    @property
    def other(self) -> tuple[bytes, bytes]:
        """The one of who was made the primary."""
        return self.before[0], self.new


def test_both_are_there_and_what_differs_is_shown(run):
    both = BothTookWrites(run)
    back = both.back
    assert copy_numbers(back)["sent"] == 2 * MIB
    (disk,) = told(back, "diff", GROUP, f"bookmark:{PIN}", "latest", "--extents")["disks"]
    assert disk["bytes"] == 2 * MIB
    touched = {offset // MIB for offset, _ in disk["ranges"]}
    assert touched == {OLD_AT // MIB, NEW_AT // MIB}
    # Neither is passed, whatever is written, by whichever run of the server.
    guest = Connection(back.socket, DISK)
    guest.write(NEW_AT + MIB, both.old)
    guest.close()
    back.wait_settled()
    back.kill(back.backup)
    back.start_backup()
    back.wait_state("protected")
    assert shown(back, f"bookmark:{PIN}") == both.one
    assert shown(back, "latest") == both.other
    # Given up, the window's end passes it.
    back.backup_command("pin", GROUP, PIN, "--remove")
    with pytest.raises(RuntimeError, match="there is no"):
        shown(back, f"bookmark:{PIN}")
    assert shown(back, "latest") == both.other


def held(image: Path) -> tuple[bytes, bytes]:
    """What an image has at both places."""
    content = image.read_bytes()
    return content[OLD_AT:][:MIB], content[NEW_AT:][:MIB]


def check_goes_on_with(back: Pair, expected: tuple[bytes, bytes]) -> None:
    """The recovered disk is the chosen one, and can be written to."""
    back.wait_state("fenced")
    disk = recovered_disk(back)
    assert (disk.read(OLD_AT, MIB), disk.read(NEW_AT, MIB)) == expected
    disk.write(0, expected[0])
    disk.flush()
    disk.close()


def lost_marks(pair: Pair) -> list[str]:
    marks = told(pair, "pin", GROUP, "--list")["marks"]
    return [mark["name"] for mark in marks if mark["lost"]]


def test_the_group_goes_on_with_the_new_one_and_the_old_one_stays(run):
    both = BothTookWrites(run)
    back = both.back
    back.backup_command("recover", GROUP, "--primary-is-dead")
    check_goes_on_with(back, both.other)
    for _ in range(2):
        assert shown(back, f"bookmark:{PIN}") == both.one
        assert held(back.disk) == both.other, "the fenced primary's own"
        back.kill(back.backup)
        back.start_backup()
    offered = back.sockets / "exports" / GROUP / f"{NAME}.sock"
    wait_until("the disk is offered again", offered.exists, LONG_S, [back.backup])
    disk = recovered_disk(back)
    assert disk.read(0, MIB) == both.other[0], "and it has gone on"
    disk.close()


def test_the_group_goes_on_with_the_old_one_and_a_snapshot_keeps_the_new_one(run):
    """What is later than the chosen point is no point of the group's past any more, also if it was pinned. What was
    made of it before stays: a snapshot for ever, a view as long as it is open; and so does the disk of who had it."""
    both = BothTookWrites(run)
    back = both.back
    back.backup_command("pin", GROUP, "new")
    back.backup_command("snapshot", GROUP, "new", "--at", "bookmark:new")
    image = back.data_dir / "snapshots" / GROUP / "new" / f"{NAME}.img"
    view = told(back, "view", GROUP, "--at", "bookmark:new", "--detach")
    chosen = ["recover", GROUP, "--primary-is-dead", "--at", f"bookmark:{PIN}"]
    with pytest.raises(RuntimeError, match="pins of later points would be lost for good: new"):
        back.backup_command(*chosen)
    assert lost_marks(back) == [], "nothing has changed"
    back.backup_command(*chosen, "--drop-later-pins")
    assert lost_marks(back) == ["new"], "said at once"
    check_goes_on_with(back, both.one)
    disk = Connection(Path(view["disks"][0]["uri"].split("socket=")[1]), NAME)
    assert (disk.read(OLD_AT, MIB), disk.read(NEW_AT, MIB)) == both.other
    disk.close()
    for _ in range(2):
        assert shown(back, f"bookmark:{PIN}") == both.one
        assert held(back.disk) == both.other, "the fenced primary's own"
        with pytest.raises(RuntimeError, match="not in the group's history any more"):
            shown(back, "bookmark:new")
        assert held(image) == both.other
        assert "as it was" in back.backup_command("snapshot", GROUP, "--verify", "new")
        back.kill(back.backup)
        back.start_backup()


def test_a_comparison_that_is_cut_leaves_what_was_seeded(run):
    """Who protects itself is lost while its disk is compared: what was seeded can be had, if it is asked for."""
    image = written_image(run)
    content = image.read_bytes()
    other = run.directory / "other.img"
    other.write_bytes(random.Random("all else").randbytes(DISK_MIB * MIB))
    pair = Pair(run, Options(disk=other, copy_rate_mib=4))
    pair.start_backup()
    pair.backup_command("seed", GROUP, f"{NAME}={image}")
    pair.start_daemon()
    pair.wait_state("copying")
    pair.kill(pair.daemon)
    with pytest.raises(RuntimeError, match=f"--at bookmark:{PIN}"):
        pair.backup_command("recover", GROUP, "--primary-is-dead")
    pair.backup_command("recover", GROUP, "--primary-is-dead", "--at", f"bookmark:{PIN}")
    disk = recovered_disk(pair)
    for at in range(0, DISK_MIB * MIB, MIB):
        assert disk.read(at, MIB) == content[at : at + MIB], at
    disk.close()
