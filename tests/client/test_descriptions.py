"""Descriptions from `prepare_store` to the daemon, and how much fits one message to it."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from kvd_client import LookupResult, Scheduler, StoreAnswer, UsageError
from kvd_client.outbox import MAX_DESCRIBED_BYTES, Outbox
from kvd_proto.codec import WIRE
from kvd_proto.descriptions import (
    MAX_DESCRIPTION_BYTES,
    Description,
    encode,
    pack_header,
    pack_record,
    record_offset,
)
from kvd_proto.messages import MAX_KEY_BYTES, MAX_KEYS, Attached
from tests.client.fake_daemon import RECORD_BYTES, FakeDaemon
from tests.client.test_steps import answered, keys_of, wait_steps
from tests.waiting import DEADLINE, eventually

ACCEPTED, FULL = StoreAnswer.ACCEPTED, StoreAnswer.FULL
PENDING, MISS = LookupResult.HIT_PENDING, LookupResult.MISS
DESCRIPTION = Description(parent=b"", hashes=(b"h",), tokens=bytes(8), block_size=2)


@pytest.fixture
def kept(daemon: FakeDaemon) -> Iterator[int]:
    """The daemon keeps descriptions; its file has one, of slot 3."""
    daemon.descriptions = fd = os.memfd_create("descriptions")
    os.pwrite(fd, pack_header(RECORD_BYTES), 0)
    os.pwrite(fd, pack_record(3, 7, encode(DESCRIPTION)), record_offset(3, RECORD_BYTES))
    yield fd
    os.close(fd)


@pytest.fixture
def describing(daemon: FakeDaemon) -> Iterator[Scheduler]:
    """A connected scheduler made with `events=True`, which reports at the end of a step."""
    with Scheduler(
        daemon.runtime_dir, "engine", deadline=DEADLINE, steps=True, events=True
    ) as scheduler:
        yield scheduler


@pytest.mark.usefixtures("kept")
def test_descriptions_are_told_with_the_keys_that_are_accepted(
    daemon: FakeDaemon, describing: Scheduler
) -> None:
    """One for each key that begins; those of keys that are there already are not sent."""
    daemon.attach(describing)
    assert describing.describes
    keys = [b"a", b"ready", b"b", b"c"]
    describing.prepare_store(keys, descriptions=[b"of a", b"of ready", None, b"of c"])
    describing.prepare_store([b"d"])
    describing.end_step()
    (step,) = wait_steps(daemon, 1)
    assert step.keys == (b"a", b"b", b"c", b"d")
    assert step.descriptions == (b"of a", b"", b"of c", b"")


@pytest.mark.usefixtures("kept")
def test_keys_before_one_whose_description_raises_are_told_all_the_same(
    daemon: FakeDaemon, describing: Scheduler
) -> None:
    """Their stores begin in the daemon and end there; this engine has no slot left over."""
    daemon.attach(describing)

    def describe(number: int) -> bytes:
        if number == 2:
            raise OSError("no")
        return b"of %d" % number

    with pytest.raises(OSError, match="no"):
        describing.prepare_store([b"a", b"b", b"c"], descriptions=describe)
    assert describing.lookup_many([b"a", b"b", b"c"]) == [PENDING, PENDING, MISS]
    describing.end_step()
    (step,) = wait_steps(daemon, 1)
    assert (step.keys, step.descriptions) == ((b"a", b"b"), (b"of 0", b"of 1"))
    answered(describing)
    assert describing.prepare_store([b"c"], descriptions=[b"of c"]).answers == (ACCEPTED,)


@pytest.mark.parametrize(
    ("descriptions", "text"),
    [
        ([b"one"], "1 descriptions with 2 keys: one for each is needed"),
        ([b"one", "two"], "descriptions='two': what kvd_proto.descriptions.encode returned"),
        ([b"", bytes(MAX_DESCRIPTION_BYTES + 1)], "1048576 bytes at most, or None"),
        (b"of", "a collection of bytes or None is needed"),
    ],
)
def test_wrong_descriptions_are_refused_before_anything_is_done(
    stepping: Scheduler, descriptions: Any, text: str
) -> None:
    """Attached or not: one error that names the value, as for every argument."""
    with pytest.raises(UsageError) as caught:
        stepping.prepare_store([b"a", b"b"], descriptions=descriptions)
    assert text in str(caught.value)


@pytest.mark.usefixtures("kept")
def test_more_than_a_message_takes_waits_for_a_later_step(
    daemon: FakeDaemon, describing: Scheduler
) -> None:
    """What was told before leaves first; of one call alone the keys that do not fit are FULL."""
    daemon.attach(describing)
    largest = bytes(MAX_DESCRIPTION_BYTES)
    fit = MAX_DESCRIBED_BYTES // MAX_DESCRIPTION_BYTES
    assert describing.prepare_store([b"before"], descriptions=[b"x"]).answers == (ACCEPTED,)
    keys = keys_of(fit + 2)
    answers = describing.prepare_store(keys, descriptions=[largest] * (fit + 1) + [b""]).answers
    assert answers == (ACCEPTED,) * fit + (FULL, ACCEPTED)
    describing.end_step()
    first, second = wait_steps(daemon, 2)
    assert (first.keys, first.descriptions) == ((b"before",), (b"x",))
    assert second.keys == (*keys[:fit], keys[-1])
    assert (second.descriptions, second.refused) == ((*(largest,) * fit, b""), 1)
    assert describing.prepare_store([keys[fit]], descriptions=[largest]).answers == (ACCEPTED,)


def test_a_notice_without_its_descriptors_attaches_nobody(
    daemon: FakeDaemon, stepping: Scheduler, kept: int
) -> None:
    """A directory alone where descriptions are kept: the session says so and is not attached."""
    daemon.attach(stepping)
    fd = os.dup(kept)
    message = Attached(
        namespace=bytes(16),
        world_size=1,
        bytes_per_chunk=4096,
        num_chunks=1,
        reuse_threshold=1,
        description_bytes=8,
    )
    daemon.notify(message, (fd,))
    os.close(fd)
    eventually(lambda: not stepping.attached)


def test_the_largest_step_fits_a_message() -> None:
    """As many keys and as many bytes of descriptions as an outbox takes; no byte more is taken."""
    box = Outbox(2)
    size = MAX_DESCRIBED_BYTES // MAX_KEYS
    assert box.has_description_room(MAX_DESCRIBED_BYTES)
    for n in range(MAX_KEYS):
        box.start_store(n.to_bytes(MAX_KEY_BYTES, "little"), n, 2**63, (1, 1), bytes(size))
    assert not box.has_description_room(1)
    assert not box.has_room(1)
    WIRE.encode(box.take(7)[0])


def test_the_largest_step_of_leases_fits_a_message() -> None:
    """One that pins as many leases as it can beside one chunk with all the descriptions' bytes."""
    box = Outbox(2)
    pieces = MAX_DESCRIBED_BYTES // MAX_DESCRIPTION_BYTES
    for n in range(pieces):
        box.start_store(b"%048d" % n, n, 2**63, (0, 2), bytes(MAX_DESCRIPTION_BYTES))
    for lease in range(MAX_KEYS - pieces):
        box.pin(2**62 + lease, 600_000, [2**31], [2**63])
    assert not box.has_room(1)
    WIRE.encode(box.take(7)[0])
