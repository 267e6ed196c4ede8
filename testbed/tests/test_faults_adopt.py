"""The way back without stopping the guest: its disk is brought behind a daemon while it writes, and no byte is lost."""

from __future__ import annotations

import json
import signal
import socket

import pytest
from test_faults_seed import copy_numbers, recovered_image, written_image

from tidelock_testbed.drilling import NEVER_MIND_S, Knobs
from tidelock_testbed.failback import Failback
from tidelock_testbed.hostdaemon import writer_of
from tidelock_testbed.oracle import Load, Oracle
from tidelock_testbed.pair import DISK, GROUP, LONG_S, MEMBER, MIB, Options, Pair
from tidelock_testbed.paths import BIN
from tidelock_testbed.process import Process, kill_at_once, run_command, wait_until
from tidelock_testbed.progress import say
from tidelock_testbed.rig import Recovery
from tidelock_testbed.risk import word_of
from tidelock_testbed.storagedaemon import StorageDaemon

DISK_MIB = 64
WRITTEN_MIB = 4
NAME = f"{MEMBER}.{DISK}"
SLOW = "4MiB/s"
"""Of a copy that is to be met in the middle."""


class Away:
    """A group that was recovered, whose guest writes by way of QEMU; and what is to protect it from then on."""

    def __init__(self, run):
        self.run = run
        self.home = Pair(run, Options(mode="sync", disk=written_image(run)))
        self.home.start()
        self.oracle = Oracle(WRITTEN_MIB * MIB)
        load = self.home.load(self.oracle, "at home")
        wait_until("some writes", lambda: load.replies > 500, LONG_S, [self.home.daemon])
        self.home.kill(self.home.daemon)
        load.vanish()
        self.oracle.server_died()
        recovery = self.home.start_recovery("--primary-is-dead")
        assert recovery.wait(LONG_S) == 0, recovery.tail()
        exports = self.home.sockets / "exports" / GROUP / f"{NAME}.sock"
        self.qemu = StorageDaemon(run, {DISK: f"nbd+unix:///{NAME}?socket={exports}"})
        self.load = Load(self.qemu.socket, DISK, self.oracle, "away")
        self.back = Pair(run, Options(mode="sync", disk=run.directory / "away.img"), name="back")

    def seed(self) -> None:
        """The old disk is the beginning of the copy."""
        self.back.start_backup()
        self.back.backup_command("seed", GROUP, f"{NAME}={self.home.disk}", "--move")

    def words(self, *options: object) -> list[object]:
        words = [BIN / "tidelock", "adopt", GROUP, "--qmp", self.qemu.qmp, *options]
        return [*words, "--socket", self.back.control_socket, "--config", self.back.host_config]

    def adopt(self, *options: object) -> str:
        return run_command(self.words(*options), "adopt", timeout_s=LONG_S)

    def begin_adoption(self, *options: object) -> Process:
        return Process(self.run, "adopt", self.words(*options))

    def prepare(self) -> None:
        """A blank disk, and a daemon that waits for what is to be on it."""
        self.adopt("--prepare")
        self.back.start_daemon()
        self.back.wait_state("unrecorded")

    def writes_on(self, more: int = 300) -> None:
        """The guest gets answers, and no errors."""
        begin = self.load.replies
        wait_until("the guest writes on", lambda: self.load.replies > begin + more, LONG_S, [self.qemu.process])
        assert self.load.errors == []

    def nodes(self) -> list[str]:
        """What QEMU has of disks: asked as the command does, while no command runs."""
        with socket.socket(socket.AF_UNIX) as qmp:
            qmp.settimeout(LONG_S)
            qmp.connect(str(self.qemu.qmp))
            lines = qmp.makefile("rw")
            lines.readline()
            answers = []
            for command in ("qmp_capabilities", "query-named-block-nodes"):
                lines.write(json.dumps({"execute": command}) + "\n")
                lines.flush()
                answers.append(json.loads(lines.readline()))
        return [node["node-name"] for node in answers[-1]["return"]]

    def copied_mib(self) -> int:
        """What the guest's daemon has been given."""
        return writer_of(self.back.group())["guest_io"]["written_bytes"] // MIB


def test_there_and_back_again_while_the_guest_writes(run):
    """Adopted under load, protected by delta; then the disaster at the second site: all is at the first."""
    away = Away(run)
    away.seed()
    away.prepare()
    back = away.back
    away.writes_on()
    # The backup is there, and hears nothing: what it has is still what the old primary had.
    group = back.group()
    assert (word_of(group), group["awaits_adoption"]) == ("unrecorded", True)
    assert "tidelock adopt" in group["detail"]
    assert "no host has compared it" in back.backup_command("status")
    told = json.loads(away.adopt("--json"))
    assert told["adopted"] == [{"member": MEMBER, "disk": DISK, "size_bytes": DISK_MIB * MIB}]
    away.writes_on()
    back.wait_state("protected")
    assert not back.group()["awaits_adoption"]
    numbers = copy_numbers(back)
    assert numbers["compared"] == DISK_MIB * MIB
    assert numbers["sent"] <= (WRITTEN_MIB + 2) * MIB, numbers
    # The view is nobody's disk any more: what serves it can go.
    away.home.kill(away.home.backup)
    away.writes_on()
    back.kill(back.daemon, away.qemu.process)
    away.load.vanish()
    recovery = back.start_recovery("--primary-is-dead")
    assert recovery.wait(LONG_S) == 0, recovery.tail()
    image = recovered_image(back, DISK_MIB)
    assert away.oracle.violations(image) == []


def ended(adoption: Process, status: int) -> str:
    """What a command has said that has failed."""
    assert adoption.wait(LONG_S) == status, adoption.tail()
    return adoption.log.read_text()


def test_what_ends_in_the_middle_leaves_the_guest_where_it_was(run):
    """The daemon dies, Ctrl-C is pressed, the command is killed: the guest writes on, and it can be done again."""
    away = Away(run)
    back = away.back
    with pytest.raises(RuntimeError, match="no daemon answers"):
        away.adopt()
    away.prepare()
    with pytest.raises(RuntimeError, match="tidelockd runs here"):
        away.adopt("--prepare")
    assert len(away.nodes()) == 1, "the guest's view"

    def in_the_middle() -> Process:
        adoption = away.begin_adoption("--rate", SLOW)
        wait_until("something is copied", lambda: away.copied_mib() >= 4, LONG_S, [adoption])
        return adoption

    adoption = in_the_middle()
    back.kill(back.daemon)
    said = ended(adoption, 3)
    assert "the guest goes on where it was" in said and "the daemon does not answer" in said
    away.writes_on()
    assert len(away.nodes()) == 1, "nothing is left of it in QEMU"

    # Its next run knows that the disk is not whole.
    away.seed()
    back.start_daemon()
    assert back.wait_state("unrecorded")["awaits_adoption"]
    adoption = in_the_middle()
    adoption.signal(signal.SIGINT)
    assert "it was ended by hand" in ended(adoption, 1)
    away.writes_on()
    assert len(away.nodes()) == 1

    # Its copy goes on without the command, and across a daemon that is restarted.
    in_the_middle().kill()
    back.kill(back.daemon)
    back.start_daemon()
    away.adopt()
    away.writes_on()
    back.wait_state("protected")
    with pytest.raises(RuntimeError, match="does not wait to be adopted"):
        away.adopt()
    away.home.kill(away.home.backup)
    away.writes_on()
    away.load.finish()
    assert away.load.errors == []
    back.check_sites(away.oracle)


def test_a_guest_that_was_moved_by_other_means_is_taken_as_it_is(run):
    """As with libvirt's `virsh blockcopy`: only the group is let begin, and only if somebody says so."""
    away = Away(run)
    away.seed()
    away.prepare()
    back = away.back
    away.load.finish()
    away.qemu.process.kill()
    moved = StorageDaemon(run, {DISK: f"nbd+unix:///{DISK}?socket={back.socket}"}, "moved")
    words = [BIN / "tidelock", "adopt", GROUP, "--done", "--socket", back.control_socket]
    with pytest.raises(RuntimeError, match="--yes"):
        run_command(words, "let it begin")
    assert back.group()["awaits_adoption"]
    load = Load(moved.socket, DISK, Oracle(WRITTEN_MIB * MIB), "moved")
    run_command([*words, "--yes"], "let it begin")
    back.wait_state("protected")
    load.finish()
    assert load.errors == []
    back.check_sites(load.oracle)
    back.daemon.stop()
    with pytest.raises(RuntimeError, match="has protected shop before"):
        away.adopt("--prepare")


class DiesAway(Failback):
    """The second site is lost, too, before the group has gone home."""

    name = "dies-away"

    def switch_home(self) -> None:
        """In its place the disaster: right after a client was told something."""
        rig = self.rig
        self.worst_moment()
        kill_at_once([*self.guest.processes, *self.storage_processes(), self.daemon.process])
        rig.net.wan.cut()
        self.switched_at = self.event("second disaster")
        say("DISASTER: the second site is gone")
        self.recovery = Recovery(rig, "--primary-is-dead", site=rig.net.primary, server=self.home, name="guest-home")
        self.recovery.wait_recovered(NEVER_MIND_S)
        rig.net.route_clients_to(rig.net.primary, rig.guest_net)
        self.recovery.wait_ready()
        self.first_answer(self.recovery.recovered_at, self.recovery.guest)

    def check_disks(self) -> None:
        """There was no switch at which they could have been equal."""


def test_what_clients_were_told_by_an_adopted_guest_survives_the_second_site(run):
    """Disaster, adoption under load, `protected`, and the next disaster: one ledger, nothing of it is lost."""
    this = DiesAway(run, Knobs(scenario="dies-away", guest="process", rtt_ms=20, hurry=True, seed=7))
    this.execute()
    assert this.entry.passed, this.entry
