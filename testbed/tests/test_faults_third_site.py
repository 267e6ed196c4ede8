"""To a third site: after a disaster the group is protected by a backup server that has never heard of it, at a site
that is neither of the two, while the guest runs on. The promises are the same, and the old site never comes back."""

from __future__ import annotations

from tidelock_testbed.drilling import NEVER_MIND_S, Knobs
from tidelock_testbed.failback import Failback
from tidelock_testbed.hostdaemon import Protection
from tidelock_testbed.net import Site
from tidelock_testbed.process import kill_at_once
from tidelock_testbed.progress import say
from tidelock_testbed.rig import Recovery, Rig


class ToAThirdSite(Failback):
    """The way back, but to elsewhere, and with nothing there to begin with."""

    name = "third-site"

    def make_rig(self, protection: Protection) -> Rig:
        """Of the first site nothing is left after the disaster."""
        rig = super().make_rig(protection)
        rig.site_returns = False
        self.third = rig.net.add_third_site(self.knobs.rtt_ms)
        return rig

    @property
    def home_site(self) -> Site:
        return self.third

    @property
    def home_address(self) -> str:
        return self.rig.net.THIRD4

    def old_site_returns(self) -> None:
        """It does not."""

    def seed(self) -> None:
        """A server with an empty directory."""
        self.start_server(self.run.directory / "third")
        say("third: tidelock-backup runs, and knows of nothing")

    def adopt(self) -> None:
        super().adopt()
        self.disk_bytes = self.disk.stat().st_size

    def check_copied(self, compared: int, sent: int) -> None:
        """All of it, but for what is zeroes there already."""
        self.check("the disk was copied as a whole", self.disk_bytes / 2 < sent <= self.disk_bytes * 1.1)


class AndThenADisaster(ToAThirdSite):
    """The second site is lost, too: what is at the third is all there is."""

    name = "third-site-after-two-disasters"

    def switch_home(self) -> None:
        """In its place the disaster, right after a client was told something."""
        rig = self.rig
        self.worst_moment()
        kill_at_once([*self.guest.processes, *self.storage_processes(), self.daemon.process])
        self.switched_at = self.event("second disaster")
        say("DISASTER: the second site is gone")
        self.recovery = Recovery(rig, "--primary-is-dead", site=self.third, server=self.home, name="guest-third")
        self.recovery.wait_recovered(NEVER_MIND_S)
        rig.net.route_clients_to(self.third, rig.guest_net)
        self.recovery.wait_ready()
        self.first_answer(self.recovery.recovered_at, self.recovery.guest)

    def check_disks(self) -> None:
        """There was no switch at which they could have been equal."""


def test_a_group_moves_on_to_a_third_site(run):
    """Disaster, adoption, `protected` by the third site, and a planned switch to there: nothing is lost on the way, and
    the disks are equal byte by byte."""
    this = ToAThirdSite(run, Knobs(scenario=ToAThirdSite.name, guest="process", rtt_ms=20, hurry=True, seed=3))
    this.execute()
    assert this.entry.passed, this.entry
    assert this.home.status()["groups"][0]["recovered"]["primary_declared_dead"] is False


def test_what_clients_were_told_is_at_the_third_site_when_the_other_two_are_gone(run):
    knobs = Knobs(scenario=AndThenADisaster.name, guest="process", rtt_ms=20, hurry=True, seed=4)
    this = AndThenADisaster(run, knobs)
    this.execute()
    assert this.entry.passed, this.entry
    assert not list((this.run.directory / "primary").glob("**/*"))
