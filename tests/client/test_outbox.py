"""What a scheduler has decided becomes one message, in the order in which it is carried out."""

from kvd_client.outbox import MAX_DESCRIBED_BYTES, Outbox
from kvd_client.tickets import StoreAnswer
from kvd_proto.codec import WIRE
from kvd_proto.descriptions import MAX_DESCRIPTION_BYTES
from kvd_proto.labels import LABEL_ONLY, Label
from kvd_proto.messages import MAX_FINISHED, MAX_KEY_BYTES, MAX_KEYS, Step

WHOLE = (0, 2)


def outbox() -> Outbox:
    """For chunks of two blocks."""
    return Outbox(2)


def begin(box: Outbox, key: bytes, loan: tuple[int, int], blocks: tuple[int, int]) -> None:
    """Begin one store."""
    box.begin(key, *loan, blocks)


def sent(box: Outbox, request: int) -> Step:
    """What is to be told, as this request."""
    step, given = box.take(7)
    box.sent(request, given)
    return step


def tells(box: Outbox) -> bool:
    """Whether there is something to tell at once."""
    return box.urgent


def test_everything_of_a_step_is_in_its_message() -> None:
    """Stores, drops, pins, leases given back, what was used and missed, and loans wanted."""
    box = outbox()
    begin(box, b"a", (3, 30), WHOLE)
    begin(box, b"b", (4, 40), (1, 1))
    box.drop([b"old"])
    box.pin(9, 1500, [5, 6], [50, 60])
    box.unpin(8)
    box.use([b"a", b"b"], 2, Label.NONE)
    box.miss([b"c"])
    box.leave_out([b"d"])
    assert box.urgent
    step = sent(box, 1)
    assert (step.keys, step.dropped, step.used) == ((b"a", b"b"), (b"old",), (b"a", b"b"))
    assert (step.missed, step.unstored) == ((b"c",), (b"d",))
    assert (step.slots.numpy().tolist(), step.generations.numpy().tolist()) == ([3, 4], [30, 40])
    assert (step.first.numpy().tolist(), step.count.numpy().tolist()) == ([0, 1], [2, 1])
    (pin,) = step.pins
    assert (pin.lease, pin.lease_ms, pin.slots.numpy().tolist()) == (9, 1500, [5, 6])
    assert (step.unpinned, step.wanted) == ((8,), 7)
    assert sent(box, 2) == Step(wanted=7)


def test_blocks_are_left_out_where_all_chunks_are_whole() -> None:
    """The usual message is short."""
    box = outbox()
    begin(box, b"a", (3, 30), WHOLE)
    step = sent(box, 1)
    assert not len(step.first)
    assert not len(step.count)


def test_counts_wait_for_another_message_but_for_refused_keys() -> None:
    """Keys without a slot are told of at once: the answer brings loans."""
    box = outbox()
    box.count([StoreAnswer.PRESENT, StoreAnswer.PENDING, StoreAnswer.PENDING, StoreAnswer.NOT_YET])
    assert box
    assert not tells(box)
    box.count([StoreAnswer.FULL, StoreAnswer.ACCEPTED])
    assert tells(box)
    step = sent(box, 1)
    assert (step.present, step.pending, step.not_yet, step.refused) == (1, 2, 1, 1)
    assert not box


def test_requests_come_in_the_order_in_which_they_ended() -> None:
    """With each its count of keys, of its prompt's, and its label."""
    box = outbox()
    box.use([b"a1", b"a2"], 1, Label.DONE)
    box.use([b"b1"], 0, LABEL_ONLY | Label.LATER)
    step = sent(box, 1)
    assert step.used == (b"a1", b"a2", b"b1")
    assert (step.used_counts.tolist(), step.prompt_counts.tolist()) == ([2, 1], [1, 0])
    assert step.labels == bytes((Label.DONE, LABEL_ONLY | Label.LATER))


def test_one_request_without_a_label_is_its_keys_alone() -> None:
    """Counts that say nothing are left out; those that differ from the usual are not."""
    box = outbox()
    box.use([b"a1", b"a2"], 2, Label.NONE)
    assert sent(box, 1) == Step(used=(b"a1", b"a2"), wanted=7)
    box.use([b"a1", b"a2"], 1, Label.NONE)
    step = sent(box, 2)
    assert (step.used_counts.tolist(), step.prompt_counts.tolist()) == ([], [1])


def test_a_slot_is_given_until_its_own_step_is_answered() -> None:
    """A slot that was lent and given again meanwhile waits for the later answer."""
    box = outbox()
    begin(box, b"a", (3, 30), WHOLE)
    begin(box, b"b", (4, 40), WHOLE)
    assert set(box.given) == {3, 4}
    sent(box, 1)
    begin(box, b"c", (3, 31), WHOLE)
    sent(box, 2)
    box.answered(1)
    assert set(box.given) == {3}
    box.answered(2)
    assert not box.given


def test_a_chunk_is_pinned_until_the_latest_step_that_pins_it_is_answered() -> None:
    """Until then its slot may still be on loan here."""
    box = outbox()
    box.pin(1, 1000, [3, 4], [30, 40])
    sent(box, 1)
    box.pin(2, 1000, [4], [40])
    sent(box, 2)
    assert set(box.pinned) == {3, 4}
    box.answered(1)
    assert set(box.pinned) == {4}
    box.answered(2)
    assert not box.pinned


def test_a_key_has_begun_until_its_own_step_is_answered() -> None:
    """Answers to other steps say nothing of it; one that was begun anew waits for the later one."""
    box = outbox()
    begin(box, b"a", (3, 30), WHOLE)
    sent(box, 1)
    begin(box, b"b", (4, 40), WHOLE)
    sent(box, 2)
    assert set(box.begun) == {b"a", b"b"}
    box.answered(1)
    box.answered(99)
    assert set(box.begun) == {b"b"}
    box.drop([b"b"])
    begin(box, b"b", (5, 50), WHOLE)
    step = sent(box, 3)
    assert (step.dropped, step.keys) == ((b"b",), (b"b",))
    box.answered(2)
    assert set(box.begun) == {b"b"}
    box.answered(3)
    assert not box.begun


def test_a_store_given_up_in_the_step_that_begins_it_is_dropped_by_the_next_message() -> None:
    """In one message the drop would come before the beginning."""
    box = outbox()
    begin(box, b"a", (3, 30), WHOLE)
    box.drop([b"a"])
    assert b"a" in box.begun
    first = sent(box, 1)
    assert (first.dropped, first.keys) == ((), (b"a",))
    assert box.urgent
    assert b"a" not in box.begun
    second = sent(box, 2)
    assert (second.dropped, second.keys) == ((b"a",), ())
    assert not box


def test_a_message_has_room_for_so_many_keys() -> None:
    """Stores, pinned chunks, leases, used, missed and unstored keys together."""
    box = outbox()
    assert box.room(MAX_KEYS)
    box.use([b"k"] * (MAX_KEYS - 4), 0, Label.NONE)
    box.pin(1, 1000, [1], [1])
    box.miss([b"k"])
    box.leave_out([b"k"])
    assert box.room(1)
    assert not box.room(2)
    sent(box, 1)
    assert box.room(MAX_KEYS)


def test_a_message_has_room_for_so_many_requests() -> None:
    """The daemon refuses more."""
    box = outbox()
    for _ in range(MAX_FINISHED):
        assert box.room(1)
        box.use([b"k"], 1, Label.NONE)
    assert not box.room(1)
    sent(box, 1)
    assert box.room(1)


def test_descriptions_stay_with_their_keys() -> None:
    """Where some chunks of a step are described, each key has its item; else there are none."""
    box = outbox()
    begin(box, b"a", (3, 30), WHOLE)
    box.begin(b"b", 4, 40, WHOLE, b"of b")
    box.begin(b"c", 5, 50, WHOLE, b"")
    begin(box, b"d", (6, 60), WHOLE)
    step = sent(box, 1)
    assert (step.keys, step.descriptions) == ((b"a", b"b", b"c", b"d"), (b"", b"of b", b"", b""))
    box.begin(b"e", 7, 70, WHOLE, b"")
    assert sent(box, 2).descriptions == ()


def test_the_largest_step_fits_a_message() -> None:
    """As many keys and as many bytes of descriptions as an outbox takes; no byte more is taken."""
    box = outbox()
    size = MAX_DESCRIBED_BYTES // MAX_KEYS
    assert box.room_for(MAX_DESCRIBED_BYTES)
    for n in range(MAX_KEYS):
        box.begin(n.to_bytes(MAX_KEY_BYTES, "little"), n, 2**63, (1, 1), bytes(size))
    assert not box.room_for(1)
    assert not box.room(1)
    WIRE.encode(sent(box, 1))
    assert box.room_for(MAX_DESCRIBED_BYTES)


def test_the_largest_step_of_leases_fits_a_message() -> None:
    """One that pins as many leases as it can beside one chunk with all the descriptions' bytes."""
    box = outbox()
    pieces = MAX_DESCRIBED_BYTES // MAX_DESCRIPTION_BYTES
    for n in range(pieces):
        box.begin(b"%048d" % n, n, 2**63, WHOLE, bytes(MAX_DESCRIPTION_BYTES))
    for lease in range(MAX_KEYS - pieces):
        box.pin(2**62 + lease, 600_000, [2**31], [2**63])
    assert not box.room(1)
    WIRE.encode(sent(box, 1))
