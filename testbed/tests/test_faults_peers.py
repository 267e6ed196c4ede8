"""Peers that lie, stutter or vanish: on the guest's socket and on the link. The servers live on (DESIGN rule 4)."""

from __future__ import annotations

import json
import random
import signal
import socket
import struct

import pytest

from tidelock_testbed import nbdwire, rawlink
from tidelock_testbed.hostdaemon import writer_of
from tidelock_testbed.oracle import BLOCK, Oracle
from tidelock_testbed.pair import DISK, GROUP, HOST, LONG_S, MEMBER, MIB, Options, Pair
from tidelock_testbed.pki import Pki
from tidelock_testbed.process import wait_until
from tidelock_testbed.rawlink import RawLink
from tidelock_testbed.risk import word_of


def connections(pair: Pair) -> int:
    return writer_of(pair.group())["guest_io"]["connections"]


def raw_guest(pair: Pair) -> socket.socket:
    guest = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    guest.settimeout(30)
    guest.connect(str(pair.socket))
    return guest


def test_guest_that_vanishes_in_the_middle_of_a_write(run):
    """Nothing of a half-sent write reaches a disk; other connections do not notice."""
    chance = random.Random("vanish")
    pair = Pair(run)
    pair.start()
    # The vanishing guest writes where the other does not: this must stay what it is.
    untouched = 31 * MIB
    oracle = Oracle(untouched)
    load = pair.load(oracle, "other")
    for length in [BLOCK, 512, 64 << 10, 1 << 20] * 4:
        guest = nbdwire.Connection(pair.socket, DISK)
        sent = chance.randrange(length)
        guest.send(nbdwire.WRITE, untouched, length, b"\xee" * sent)
        guest.close()
    # In the middle of a header, too.
    for cut in range(1, 28, 5):
        guest = nbdwire.Connection(pair.socket, DISK)
        guest.socket.sendall(struct.pack(">IHHQQI", 0x25609513, 0, nbdwire.WRITE, 9, untouched, BLOCK)[:cut])
        guest.close()
    wait_until("the daemon has let them go", lambda: connections(pair) == 1, 60, [pair.daemon])
    assert load.alive()
    load.finish()
    assert load.errors == []
    oracle.blocks = 32 * MIB // BLOCK
    pair.check_sites(oracle)


def test_garbage_on_the_guests_socket(run):
    """Whatever is not NBD costs its connection, nothing else."""
    chance = random.Random("garbage")
    pair = Pair(run)
    pair.start()
    oracle = Oracle(32 * MIB)
    load = pair.load(oracle, "other")
    for round_number in range(30):
        guest = raw_guest(pair)
        garbage = chance.randbytes(chance.randrange(1, 5000))
        if round_number % 3 == 0:  # right flags, garbage as options
            garbage = struct.pack(">I", 3) + garbage
        if round_number % 3 == 1:  # an option that claims a huge length
            garbage = struct.pack(">I", 3) + b"IHAVEOPT" + struct.pack(">II", 7, 0xFFFFFFFF) + garbage
        try:
            guest.sendall(garbage)
            guest.shutdown(socket.SHUT_WR)
            while guest.recv(65536):
                pass
        except TimeoutError:
            raise
        except OSError:  # it was closed first
            pass
        guest.close()
    # Past the negotiation: a wrong magic, an unknown command, beyond the end, far too long.
    for request in [
        struct.pack(">IHHQQI", 0xDEADBEEF, 0, nbdwire.WRITE, 1, 0, BLOCK),
        struct.pack(">IHHQQI", 0x25609513, 0, 777, 1, 0, 0),
        struct.pack(">IHHQQI", 0x25609513, 0, nbdwire.WRITE, 1, 32 * MIB, 16) + bytes(16),
        struct.pack(">IHHQQI", 0x25609513, 0, nbdwire.READ, 1, 2**64 - 1, 4096),
        struct.pack(">IHHQQI", 0x25609513, 0, nbdwire.WRITE, 1, 0, 0xFFFFFFFF),
    ]:
        guest = nbdwire.Connection(pair.socket, DISK)
        guest.socket.sendall(request)
        try:
            error, cookie = guest.reply()
            assert (error != 0) and cookie == 1
        except ConnectionError:
            pass
        guest.close()
    wait_until("the daemon has let them go", lambda: connections(pair) == 1, 60, [pair.daemon])
    assert load.alive()
    load.finish()
    assert load.errors == []
    pair.check_sites(oracle)


def test_garbage_on_the_link(run):
    """With a valid certificate and without one: the connection ends, other hosts do not notice."""
    chance = random.Random("link garbage")
    pair = Pair(run)
    pair.start()
    oracle = Oracle(32 * MIB)
    load = pair.load(oracle, "other")
    for _ in range(10):
        plain = RawLink(pair.port, None)
        plain.send(chance.randbytes(chance.randrange(1, 3000)))
        plain.socket.shutdown(socket.SHUT_WR)
        plain.wait_closed()
        plain.close()
    hello = rawlink.hello(HOST)
    damaged = hello[:-1] + bytes([hello[-1] ^ 1])
    hostile = [
        chance.randbytes(2000),
        damaged,
        rawlink.frame(b"\x07" * 40),
        rawlink.frame(b"", length=1 << 31),
        rawlink.frame(b"\xff" * 10, kind=77),
        rawlink.frame(chance.randbytes(200), kind=rawlink.RECORD, channel=1),
        # A hello that is right, then nonsense: a channel that is not attached, a record on it, garbage.
        hello + rawlink.frame(chance.randbytes(300), kind=rawlink.RECORD, channel=3),
        hello + rawlink.frame(bytes([rawlink.BEACON]) + b"\x05", channel=9),
        hello + chance.randbytes(5000),
        hello + hello,
    ]
    for data in hostile:
        link = RawLink(pair.port, pair.host_tls)
        link.send(data)
        link.wait_closed()
        link.close()
    # Cut off in the middle.
    for cut in range(1, len(hello), 7):
        link = RawLink(pair.port, pair.host_tls)
        link.send(hello[:cut])
        link.close()
    assert pair.backup.alive()
    link = RawLink(pair.port, pair.host_tls)
    link.send(hello)
    assert link.message()[0] == rawlink.WELCOME
    link.close()
    assert load.alive()
    load.finish()
    pair.check_sites(oracle)
    assert pair.status()["link"]["connects"] == 1, "the real host's connection was not touched"


def test_wrong_versions_are_told(run):
    """The refusal says which versions are spoken, and what to do."""
    pair = Pair(run)
    pair.start_backup()
    link = RawLink(pair.port, pair.host_tls)
    link.send(rawlink.hello(HOST, 99, 99))
    kind, reason = link.refusal()
    assert kind == rawlink.REFUSED_VERSION
    assert "from 99 to 99" in reason and "upgrade the older side" in reason
    link.wait_closed()
    link = RawLink(pair.port, pair.host_tls)
    link.send(rawlink.frame(b"whatever this will mean", version=9))
    kind, reason = link.refusal()
    assert kind == rawlink.REFUSED_VERSION
    assert "frame format 9" in reason
    link.wait_closed()
    link = RawLink(pair.port, pair.host_tls)
    link.send(rawlink.hello("host-b"))
    kind, reason = link.refusal()
    assert kind == rawlink.REFUSED_FORBIDDEN
    assert "host-a" in reason and "host-b" in reason


def test_certificates_that_do_not_fit(run):
    """Another authority's, or another host's: never attached, never protected, and status says why."""
    pair = Pair(run)
    pair.start_backup()
    stranger = Pki(pair.directory / "other-authority").issue("host", HOST, pair.directory / "other-tls")
    pair.write_host_config(stranger)
    pair.start_daemon()
    problem = wait_until("the link's problem is known", lambda: pair.status()["link"]["problem"], 60, [pair.daemon])
    assert "certificate" in problem
    assert word_of(pair.group()) == "disconnected"
    assert pair.backup_status()["groups"] == []
    assert problem in pair.status_text()
    pair.kill(pair.daemon)

    # The server refuses the stranger as well, if the stranger trusts the server.
    trusting = rawlink.TlsFiles(pair.host_tls.ca, stranger.certificate, stranger.key)
    with pytest.raises(OSError):  # an alert, after the client's own connect has succeeded
        link = RawLink(pair.port, trusting)
        link.send(rawlink.hello(HOST))
        link.message()

    # One's own certificate with another name: told before anything starts, with the place and the remedy.
    pair.write_host_config(pair.host_tls, name="host-b")
    pair.start_daemon(wait=False)
    assert pair.daemon.wait(60) == 1
    assert "host.toml:2:8: the certificate" in pair.daemon.log.read_text()
    assert 'write instead: name = "host-a"' in pair.daemon.log.read_text()
    assert pair.backup_status()["groups"] == []

    pair.write_host_config(pair.host_tls)
    pair.start_daemon()
    pair.wait_state("protected")


def test_an_epoch_that_was_never_granted(run):
    """A state file with another epoch: refused, and nothing of this host is taken."""
    pair = Pair(run)
    pair.start()
    pair.daemon.stop()
    state = json.loads(pair.state_file.read_text())
    assert state["epoch"] == pair.backup_group()["epoch"]
    durable = pair.backup_group()["writers"][0]["durable"]
    pair.state_file.write_text(json.dumps({**state, "epoch": state["epoch"] + 7, "clean": None}))
    pair.start_daemon()
    group = pair.wait_state("fenced", "stalled")
    assert "epoch" in group["detail"], group["detail"]
    assert pair.backup_group()["writers"][0]["durable"] == durable


def test_recovery_while_the_old_primary_lives(run):
    """The grace is waited for; then the primary is fenced and says so, and the recovered disk is the cut."""
    pair = Pair(run)
    pair.start()
    oracle = Oracle(32 * MIB)
    load = pair.load(oracle, "old life")
    wait_until("some writes", lambda: load.replies > 1000, 60)
    load.finish()
    pair.wait_settled()
    # The primary lives and renews its lease: nobody may be promoted.
    recover = pair.start_recovery()
    assert recover.wait(60) != 0
    assert "switchover" in recover.log.read_text()
    assert word_of(pair.group()) == "protected"
    pair.daemon.signal(signal.SIGSTOP)
    recover = pair.start_recovery()
    wait_until("it waits for the grace", lambda: "waiting until" in recover.log.read_text(), 60)
    assert recover.wait(60) == 0, recover.tail()
    recovered = pair.backup_group()["recovered"]
    assert recovered["primary_declared_dead"] is False
    assert recovered["writers"][0]["left_out"] == 0
    pair.daemon.signal(signal.SIGCONT)
    group = pair.wait_state("fenced")
    assert "recovered" in group["detail"]
    assert not group["lease"]["held"] and group["told"] is None
    assert not writer_of(group)["backup_has_all"], "it has been told that nothing of it counts any more"
    assert "FENCED" in pair.status_text()
    assert pair.backup_group()["epoch"] == recovered["epoch"] > group["epoch"]

    export = run.sockets / "exports" / GROUP / f"{MEMBER}.{DISK}.sock"
    name = f"{MEMBER}.{DISK}"
    image = pair.directory / "recovered.img"
    guest = nbdwire.Connection(export, name)
    image.write_bytes(b"".join(guest.read(at, MIB) for at in range(0, 32 * MIB, MIB)))
    assert oracle.violations(image) == []
    # The new life: what it has flushed survives a crash of the server.
    after = random.Random("new life").randbytes(MIB)
    guest.write(5 * MIB, after)
    guest.flush()
    guest.close()
    pair.kill(pair.backup)
    pair.start_backup()
    wait_until("the disk is offered again", export.exists, 60, [pair.backup])
    guest = nbdwire.Connection(export, name)
    assert guest.read(5 * MIB, MIB) == after
    for at in (0, 4 * MIB, 6 * MIB, 31 * MIB):
        assert guest.read(at, MIB) == image.read_bytes()[at : at + MIB]
    guest.close()
    # The old primary goes on knocking, and stays out.
    pair.kill(pair.daemon)
    pair.start_daemon()
    assert "recovered" in pair.wait_state("fenced")["detail"]


def test_a_fenced_daemon_does_not_wait_for_what_is_never_acknowledged(run):
    """Fenced in the middle of a resync, with a guest that waits for the backup: a clean stop ends at once."""
    pair = Pair(run, Options(mode="sync", copy_rate_mib=1))
    pair.start()
    oracle = Oracle(32 * MIB)
    load = pair.load(oracle, "old life")
    wait_until("some writes", lambda: load.replies > 300, LONG_S, [pair.daemon])
    load.finish()
    pair.wait_settled()
    # While the daemon is away both sides forget each other, and everything is compared.
    pair.kill(pair.daemon)
    with pair.disk.open("r+b") as disk:
        disk.write(random.Random("behind its back").randbytes(32 * MIB))
    activity = pair.state_file.with_suffix(".activity")
    activity.unlink()
    pair.start_daemon()
    pair.wait_state("copying")
    waiting = pair.load(oracle, "waits")
    wait_until("a write is under way", waiting.in_flight, LONG_S, [pair.daemon])
    assert pair.start_recovery("--primary-is-dead").wait(LONG_S) == 0
    pair.wait_state("fenced")
    wait_until("the guest waits", lambda: waiting.in_flight() == 16, LONG_S, [pair.daemon])
    assert pair.daemon.stop() == 0
    said = pair.daemon.log.read_text()
    assert "takes nothing more" in said and "did not take everything in time" not in said
    waiting.vanish()
    pair.start_daemon()
    pair.wait_state("fenced")
    assert pair.daemon.stop() == 0
