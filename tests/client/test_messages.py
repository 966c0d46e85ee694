"""What a step says besides stores and loads: uses, descriptions, and how much fits one message."""

import os
from collections.abc import Iterator

import pytest

from kvd_client import Label, LookupResult, Scheduler, StoreAnswer
from kvd_client.outbox import MAX_DESCRIBED_BYTES, Outbox
from kvd_proto.codec import WIRE
from kvd_proto.descriptions import (
    MAX_DESCRIPTION_BYTES,
    pack_header,
)
from kvd_proto.messages import LABEL_ONLY, MAX_FINISHED, MAX_KEY_BYTES, MAX_KEYS, Attached
from tests.client.fake_daemon import RECORD_BYTES, FakeDaemon
from tests.client.test_steps import answered, keys_of, wait_steps
from tests.waiting import DEADLINE, eventually

ACCEPTED, FULL = StoreAnswer.ACCEPTED, StoreAnswer.FULL
PENDING, MISS = LookupResult.HIT_PENDING, LookupResult.MISS


@pytest.fixture
def describing(daemon: FakeDaemon) -> Iterator[Scheduler]:
    """A scheduler made with `events=True`, attached to a daemon that keeps descriptions."""
    daemon.descriptions = fd = os.memfd_create("descriptions")
    os.pwrite(fd, pack_header(RECORD_BYTES), 0)
    with Scheduler(
        daemon.runtime_dir, "engine", deadline=DEADLINE, steps=True, events=True
    ) as scheduler:
        daemon.attach(scheduler)
        yield scheduler
    os.close(fd)


def test_a_step_reports_uses_misses_and_gaps(daemon: FakeDaemon, stepping: Scheduler) -> None:
    """Requests in order, with prompt and label; a label that comes later; nothing for no keys."""
    daemon.attach(stepping)
    stepping.request_finished([b"a", b"b", b"c"], prompt=2, label=Label.DONE)
    stepping.request_finished([b"d"])
    stepping.label([b"a", b"b"], Label.LATER)
    stepping.report_missed([b"e", b"f"])
    stepping.give_up([b"g"])
    for call in (stepping.request_finished, stepping.report_missed, stepping.give_up):
        call([])
    stepping.label([], Label.DONE)
    stepping.end_step()
    (step,) = wait_steps(daemon, 1)
    assert step.used == (b"a", b"b", b"c", b"d", b"a", b"b")
    assert (step.used_counts.tolist(), step.prompt_counts.tolist()) == ([3, 1, 2], [2, 1, 0])
    assert step.labels == bytes((Label.DONE, Label.NONE, LABEL_ONLY | Label.LATER))
    assert (step.missed, step.unstored) == ((b"e", b"f"), (b"g",))


def test_too_much_for_a_message_leaves_early(daemon: FakeDaemon, stepping: Scheduler) -> None:
    """Too many keys or requests for one step: the daemon would refuse it, and end the session."""
    daemon.attach(stepping)
    many = keys_of(40_000)
    stepping.request_finished(many)
    stepping.request_finished(many)
    stepping.end_step()
    for _ in range(MAX_FINISHED + 10):
        stepping.request_finished([b"ready"])
    stepping.end_step()
    sent = wait_steps(daemon, 4)
    assert [len(step.used) for step in sent[:2]] == [40_000, 40_000]
    assert [len(step.used_counts) for step in sent[2:]] == [MAX_FINISHED, 10]


def test_keys_before_a_description_that_raises(daemon: FakeDaemon, describing: Scheduler) -> None:
    """Their stores begin in the daemon and end there; this engine has no slot left over."""

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


def test_too_many_descriptions_wait_for_a_step(daemon: FakeDaemon, describing: Scheduler) -> None:
    """What was told before leaves first; of one call alone the keys that do not fit are FULL."""
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


def test_a_notice_without_descriptors_detaches(daemon: FakeDaemon, stepping: Scheduler) -> None:
    """With a directory alone, where descriptions are kept, the session is not attached."""
    daemon.attach(stepping)
    message = Attached(
        namespace=bytes(16),
        world_size=1,
        bytes_per_chunk=4096,
        num_chunks=1,
        reuse_threshold=1,
        description_bytes=8,
    )
    fd = os.memfd_create("directory")
    daemon.notify(message, (fd,))
    os.close(fd)
    eventually(lambda: not stepping.attached)


def test_the_largest_steps_fit_a_message() -> None:
    """With as many keys, described bytes and leases as an outbox takes; no byte more is taken."""
    stores, pins = Outbox(2), Outbox(2)
    assert stores.has_description_room(MAX_DESCRIBED_BYTES)
    for n in range(MAX_KEYS):
        key, described = n.to_bytes(MAX_KEY_BYTES, "little"), bytes(MAX_DESCRIBED_BYTES // MAX_KEYS)
        stores.start_store(key, n, 2**63, (1, 1), described)
    assert not stores.has_description_room(1)
    pieces = MAX_DESCRIBED_BYTES // MAX_DESCRIPTION_BYTES
    for n in range(pieces):
        pins.start_store(b"%048d" % n, n, 2**63, (0, 2), bytes(MAX_DESCRIPTION_BYTES))
    for lease in range(MAX_KEYS - pieces):
        pins.pin(2**62 + lease, 600_000, [2**31], [2**63])
    for box in (stores, pins):
        assert not box.has_room(1)
        WIRE.encode(box.take(7)[0])
