"""Other drills: what may happen before a disaster, or in its place."""

from __future__ import annotations

import signal
import time

from tidelock_testbed.risk import word_of

from .appdrill import APP_DRILLS
from .drilling import NEVER_MIND_S, CopyWatch, Drill
from .failback import Failback
from .groupfailback import GroupFailback
from .oops import Oops
from .outage import DiesInOutage, Outage
from .process import wait_until
from .progress import say
from .rig import Recovery
from .sharddrill import ShardDrill
from .workload import Clients


class TwoDisks(Drill):
    """Order across disks."""

    name = "two-disks"
    about = "as primary-dies, with the data on one protected disk and the write-ahead log on another"
    disks = 2


class LinkCut(Drill):
    """The link comes back before the disaster."""

    name = "link-cut"
    about = "the WAN is cut for a minute under load and heals; then the primary site is gone"

    def trouble(self) -> None:
        """Cuts the WAN, heals it, and lets the clients go on."""
        cut_s = 6 if self.knobs.hurry else 60
        self.rig.net.wan.cut()
        cut_at = self.event("WAN cut")
        say(f"TROUBLE: the WAN is cut, for {cut_s} s")
        self.work(cut_s, every_s=5 if cut_s > 10 else 2)
        healed_at = self.event("WAN heals")
        self.rig.net.wan.mend()
        say("the WAN is whole again")
        seconds = self.come_back(healed_at)
        say(f"the group is {self.settled} again, and clients get answers, {seconds:.1f} s after the WAN healed")
        self.entry.notes.append(f"clients got answers again {seconds:.1f} s after the WAN had healed")
        self.work(self.random.uniform(1, 3))
        if self.knobs.mode != "async":
            ledger = self.ledger.follow()
            too_early = [row for row, at in ledger.confirmed.items() if ledger.sent[row] > cut_at and at < healed_at]
            self.check("while the WAN was cut, no client was told of a row that it asked for then", not too_early)

    def come_back(self, since: float) -> float:
        """Waits until the group is well and a client was answered; returns how long that took."""
        rig = self.rig
        rig.daemon.wait_state(self.settled, NEVER_MIND_S, [rig.guest.process, rig.backup.process], CopyWatch().show)
        well_at = time.monotonic()

        def answered() -> bool:
            ledger = self.ledger.follow()
            return any(at > since and ledger.sent[row] > since for row, at in ledger.confirmed.items())

        wait_until("clients get answers again", answered, 120, [self.clients.process, rig.guest.process])
        return max(well_at, time.monotonic()) - since


class BackupRestart(LinkCut):
    """The backup server crashes before the disaster."""

    name = "backup-restart"
    about = "the backup server is killed under load and started again; then the primary site is gone"

    def trouble(self) -> None:
        """Kills the server and starts it again."""
        self.rig.backup.process.kill()
        self.event("backup killed")
        say("TROUBLE: the backup server is killed")
        self.work(self.random.uniform(0.5, 2))
        began = self.event("backup started")
        self.rig.backup.start()
        seconds = self.come_back(began)
        say(f"the backup server runs again; clients get answers {seconds:.1f} s after its start")
        self.entry.notes.append(f"clients got answers again {seconds:.1f} s after the backup server was started")
        self.work(self.random.uniform(1, 3))


class DaemonCrash(LinkCut):
    """The host daemon crashes before the disaster."""

    name = "daemon-crash"
    about = "the host daemon is killed under load and started again (resync); then the primary site is gone"

    def trouble(self) -> None:
        """Kills the daemon, and checks that nothing leaves without it."""
        self.rig.daemon.process.kill()
        killed_at = self.event("tidelockd killed")
        say("TROUBLE: tidelockd is killed")
        self.work(self.random.uniform(0.5, 2))
        began = self.event("tidelockd started")
        self.rig.daemon.start()
        ledger = self.ledger.follow()
        leaked = [row for row, at in ledger.confirmed.items() if ledger.sent[row] > killed_at and at < began]
        self.check("while tidelockd was away, no client was answered (the gate fails closed)", not leaked)
        seconds = self.come_back(began)
        say(f"tidelockd runs again, the sites are compared; clients get answers {seconds:.1f} s after its start")
        self.entry.notes.append(f"clients got answers again {seconds:.1f} s after tidelockd was started")
        self.work(self.random.uniform(1, 3))


class DuringCopy(Drill):
    """The disaster comes too early."""

    name = "during-copy"
    about = "the primary site is gone before the initial copy has ended: recovery must refuse, clearly"
    copy_rate = {"vm": "512KiB/s", "process": "6MiB/s"}

    def __init__(self, run, knobs):
        super().__init__(run, knobs)
        self.entry.promise = "before the initial copy has ended nothing is promised, and nothing is made up"

    def execute(self) -> None:
        """No recovery, so no comparison."""
        self.start_sites()
        self.rig.guest.wait_ready()
        say("primary: the guest serves clients")
        self.start_clients()
        self.work(self.random.uniform(0.5, 3), every_s=1)
        self.load_to = time.monotonic()
        group = self.rig.daemon.group()
        CopyWatch(at_once=True).show(group)
        state = word_of(group)
        self.disaster()
        say("backup: asked to recover, it must refuse")
        reason = Recovery(self.rig, "--primary-is-dead").refusal(60)
        say(f"backup: {reason}")
        self.clients.stop()
        ledger = self.ledger.sent_before(self.gone_at)
        self.entry.confirmed = self.entry.lost = len(ledger.confirmed)
        self.entry.rpo_ms = round((self.disaster_at - min(ledger.confirmed.values())) * 1e3, 1)
        self.entry.notes.append(f"recover said: {reason}")
        self.measure(ledger)
        self.check("the disaster came during the initial copy", state == "copying")
        states = {name for _, name in self.sampler.states}
        self.check("until then nothing claimed to be protected", not states & {"protected", "following"})
        self.check("recover refused and said why", "copy" in reason)
        self.conclude()


class Grace(Drill):
    """The primary site lives on, cut off from the backup only."""

    name = "grace"
    about = (
        "the WAN is cut and the old primary lives on; recovery waits out lease and grace, then only one site answers"
    )
    modes = ("sync", "pipelined")
    """In async the gate is no fence."""

    def execute(self) -> None:
        """Readers show what the old primary still says; writers rest from before the cut until after the recovery."""
        self.protect()
        self.load()
        self.rest_and_read()
        self.partition()
        self.recover()
        self.serve_again()
        self.judge()

    def rest_and_read(self) -> None:
        """Writers stop, readers start, so that replies depend on nothing that the backup lacks."""
        rig = self.rig
        self.clients.process.signal(signal.SIGSTOP)
        options = ["--read", "--pause-ms", "20", *self.patience()]
        self.readers = Clients(self.run, rig.net, rig.guest, 4, name="readers", options=options)

        def read() -> bool:
            return len(self.readers.ledger.follow().confirmed) >= 20

        wait_until("readers are answered", read, 60, [self.readers.process, rig.guest.process])
        say("clients: writers rest, readers read")
        time.sleep(1)

    def partition(self) -> None:
        """The WAN is cut; both sites live, and the clients reach the old primary."""
        self.disaster_at = self.event("WAN cut")
        self.rig.net.wan.cut()
        say("DISASTER: the WAN is cut; the old primary lives and clients still reach it")

    def recover(self, *options: str) -> None:
        """Waits out the grace; the clients stay with the old primary until well after it."""
        rig, protection = self.rig, self.rig.protection
        self.recovery = Recovery(rig, *options)
        say(f"backup: recover waits (lease {protection.lease_s:g} s, grace {protection.grace_s:g} s)")
        while not self.recovery.wait_some(2):
            self.recovery.check_alive()
            answered = self.last_answer()
            say(f"readers: last answer of the old primary {answered - self.disaster_at:.1f} s after the cut")
        self.gone_at = self.recovery.recovered_at
        seconds = self.gone_at - self.disaster_at
        self.event("recovered", self.gone_at)
        say(f"backup: recovered {seconds:.2f} s after the cut")
        self.recovery.wait_ready()
        say("backup: the guest is ready; the clients stay with the old primary for a while")
        time.sleep(1)
        rig.net.wan.mend()
        say("the WAN is whole again, and the old primary must learn that it is fenced")
        rig.daemon.wait_state("fenced", 60)
        time.sleep(2)
        self.sampler.stop()
        last = self.last_answer()
        self.readers.process.kill()
        self.check("the old primary answered no reader once the group was recovered", last < self.gone_at)
        self.check("the old primary knows that it is fenced", word_of(rig.daemon.group()) == "fenced")
        note = f"the old primary's last answer to a reader came {last - self.disaster_at:.1f} s after the cut"
        self.entry.notes.append(f"{note}, the recovery {seconds:.1f} s after it")
        self.entry.notes.append("clients were kept with the old primary for some seconds more: part of the first reply")
        say(note)
        rig.net.route_clients_to(rig.net.backup, rig.guest_net)
        self.clients.process.signal(signal.SIGCONT)

    def last_answer(self) -> float:
        """When a reader was answered last."""
        return max(self.readers.ledger.follow().confirmed.values())


SCENARIOS: dict[str, type[Drill]] = {
    drill.name: drill
    for drill in (
        *(
            Drill,
            TwoDisks,
            LinkCut,
            BackupRestart,
            DaemonCrash,
            DuringCopy,
            Grace,
            Outage,
            DiesInOutage,
            Failback,
            Oops,
        ),
        *APP_DRILLS,
        GroupFailback,
        ShardDrill,
    )
}
