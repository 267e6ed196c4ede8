"""The oracle bites: an image that lacks a completed write, or has one that was overwritten, is found out."""

from __future__ import annotations

from tidelock_testbed.oracle import BLOCK, Oracle, block_data


def image(path, *versions: int):
    path.write_bytes(b"".join(block_data(v, n) if v > 0 else bytes(BLOCK) for n, v in enumerate(versions)))
    return path


def test_a_lost_write_and_a_revived_one_are_found(tmp_path):
    oracle = Oracle(2 * BLOCK)
    first = oracle.issue(range(2), zero=False)
    assert not oracle.violations(image(tmp_path / "a", first.version, 0)), "in doubt: either may be there"
    oracle.complete(first)
    assert len(oracle.violations(image(tmp_path / "b", first.version, 0))) == 1
    second = oracle.issue(range(1), zero=False)
    oracle.complete(second)
    assert len(oracle.violations(image(tmp_path / "c", first.version, first.version))) == 1
    assert not oracle.violations(image(tmp_path / "d", second.version, first.version))
    zeroed = oracle.issue(range(1, 2), zero=True)
    oracle.complete(zeroed)
    assert not oracle.violations(image(tmp_path / "e", second.version, 0))
    assert len(oracle.violations(image(tmp_path / "f", second.version, first.version))) == 1


def test_writes_in_flight_at_once_may_land_in_any_order(tmp_path):
    oracle = Oracle(BLOCK)
    one, two = oracle.issue(range(1), zero=False), oracle.issue(range(1), zero=False)
    oracle.complete(two)
    oracle.complete(one)
    for write in (one, two):
        assert not oracle.violations(image(tmp_path / f"{write.version}", write.version))
    assert oracle.violations(image(tmp_path / "neither", 0))


def test_a_write_without_a_reply_may_be_there_until_it_is_overwritten(tmp_path):
    oracle = Oracle(BLOCK)
    lost = oracle.issue(range(1), zero=False)
    oracle.server_died()
    assert not oracle.violations(image(tmp_path / "a", lost.version))
    assert not oracle.violations(image(tmp_path / "b", 0))
    after = oracle.issue(range(1), zero=False)
    oracle.complete(after)
    assert oracle.violations(image(tmp_path / "c", lost.version))
    assert not oracle.violations(image(tmp_path / "d", after.version))


def test_a_recovered_disk_may_lack_the_last_writes_and_no_others(tmp_path):
    """Three writes, each completed before the next: any prefix, and nothing with a hole in it."""
    oracle = Oracle(3 * BLOCK)
    writes = [oracle.issue(range(block, block + 1), zero=False) for block in range(2)]
    for write in writes:
        oracle.complete(write)
    one, two = (write.version for write in writes)
    last = oracle.issue(range(2, 3), zero=False)
    oracle.complete(last)
    three = last.version
    for number, good in enumerate([(0, 0, 0), (one, 0, 0), (0, two, 0), (one, two, 0), (one, two, three)]):
        assert not oracle.violations_of_prefix(image(tmp_path / f"good-{number}", *good)), good
    for number, bad in enumerate([(0, 0, three), (one, 0, three), (0, two, three)]):
        assert oracle.violations_of_prefix(image(tmp_path / f"bad-{number}", *bad)), bad


def test_an_old_version_beside_what_came_after_it_was_overwritten(tmp_path):
    oracle = Oracle(2 * BLOCK)
    versions = []
    for block in [0, 0, 1]:
        write = oracle.issue(range(block, block + 1), zero=False)
        oracle.complete(write)
        versions.append(write.version)
    old, new, after = versions
    assert not oracle.violations_of_prefix(image(tmp_path / "a", old, 0))
    assert oracle.violations_of_prefix(image(tmp_path / "b", old, after))
    assert not oracle.violations_of_prefix(image(tmp_path / "c", new, after))
    # A zeroing after all that may be there or not; the rest may not be older for it.
    oracle.complete(oracle.issue(range(1), zero=True))
    assert not oracle.violations_of_prefix(image(tmp_path / "d", 0, after))
    assert oracle.violations_of_prefix(image(tmp_path / "e", old, after))


def test_what_was_told_must_be_in_a_recovered_disk(tmp_path):
    oracle = Oracle(2 * BLOCK)
    versions, told = [], []
    for block in range(2):
        write = oracle.issue(range(block, block + 1), zero=False)
        oracle.complete(write)
        versions.append(write.version)
        told.append(oracle.position())
    one, two = versions
    for number, (content, lacks) in enumerate(
        [((0, 0), [True, True]), ((one, 0), [False, True]), ((one, two), [False] * 2)]
    ):
        of = image(tmp_path / str(number), *content)
        assert not oracle.violations_of_prefix(of)
        assert [bool(oracle.violations_of_prefix(of, at_least)) for at_least in told] == lacks, content


def test_after_a_recovery_the_disk_holds_what_is_there_and_nothing_else(tmp_path):
    oracle = Oracle(2 * BLOCK)
    kept = oracle.issue(range(1), zero=False)
    oracle.complete(kept)
    lost = oracle.issue(range(1), zero=False)
    oracle.complete(lost)
    recovered = image(tmp_path / "recovered", kept.version, 0)
    oracle.rebase(recovered)
    assert oracle.position() == 0
    assert not oracle.violations(recovered)
    assert oracle.violations(image(tmp_path / "lost", lost.version, 0))
    after = oracle.issue(range(1, 2), zero=False)
    oracle.complete(after)
    assert after.version > lost.version
    assert oracle.violations(recovered)
    assert not oracle.violations_of_prefix(recovered)
    assert not oracle.violations(image(tmp_path / "after", kept.version, after.version))


def test_a_disk_that_was_restored_holds_the_older_content(tmp_path):
    """Later writes are gone, and a recovery may bring back either time."""
    oracle = Oracle(2 * BLOCK)
    image = tmp_path / "image"
    first = oracle.issue(range(2), zero=False)
    oracle.complete(first)
    older = b"".join(block_data(first.version, block) for block in range(2))
    second = oracle.issue(range(1), zero=False)
    oracle.complete(second)
    newer = block_data(second.version, 0) + older[BLOCK:]
    oracle.restored(older)
    image.write_bytes(newer)
    assert oracle.violations(image) and not oracle.violations_of_prefix(image)
    assert oracle.violations_of_prefix(image, at_least=oracle.position())
    image.write_bytes(older)
    assert not oracle.violations(image) and not oracle.violations_of_prefix(image, at_least=oracle.position())
    third = oracle.issue(range(1, 2), zero=False)
    oracle.complete(third)
    image.write_bytes(newer[:BLOCK] + block_data(third.version, 1))
    assert oracle.violations_of_prefix(image), "of both times"
    image.write_bytes(older[:BLOCK] + block_data(third.version, 1))
    assert not oracle.violations(image) and not oracle.violations_of_prefix(image)
