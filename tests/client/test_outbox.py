"""What a scheduler has decided becomes one message, in the order in which it is carried out."""

from kvd_client.outbox import MAX_DESCRIBED_BYTES, Outbox
from kvd_proto.codec import WIRE
from kvd_proto.descriptions import MAX_DESCRIPTION_BYTES
from kvd_proto.messages import MAX_KEY_BYTES, MAX_KEYS, Label, Step

WHOLE = (0, 2)


def outbox() -> Outbox:
    """For chunks of two blocks."""
    return Outbox(2)


def sent(box: Outbox, request: int) -> Step:
    """What is to be told, as this request."""
    step, given = box.take(7)
    box.on_sent(request, given)
    return step


def test_one_request_without_a_label_is_its_keys_alone() -> None:
    """Counts that say nothing are left out; those that differ from the usual are not."""
    box = outbox()
    box.use([b"a1", b"a2"], 2, Label.NONE)
    assert sent(box, 1) == Step(used=(b"a1", b"a2"), wanted=7)
    box.use([b"a1", b"a2"], 1, Label.NONE)
    step = sent(box, 2)
    assert (step.used_counts.tolist(), step.prompt_counts.tolist()) == ([], [1])


def test_a_chunk_is_pinned_until_the_latest_step_that_pins_it_is_answered() -> None:
    """Until then its slot may still be on loan here."""
    box = outbox()
    box.pin(1, 1000, [3, 4], [30, 40])
    sent(box, 1)
    box.pin(2, 1000, [4], [40])
    sent(box, 2)
    assert set(box.pinned) == {3, 4}
    box.on_answered(1)
    assert set(box.pinned) == {4}
    box.on_answered(2)
    assert not box.pinned


def test_a_store_given_up_in_the_step_that_begins_it_is_dropped_by_the_next_message() -> None:
    """In one message the drop would come before the beginning."""
    box = outbox()
    box.start_store(b"a", 3, 30, WHOLE, b"")
    box.drop([b"a"])
    assert b"a" in box.started_stores
    first = sent(box, 1)
    assert (first.dropped, first.keys) == ((), (b"a",))
    assert box.is_urgent
    assert b"a" not in box.started_stores
    second = sent(box, 2)
    assert (second.dropped, second.keys) == ((b"a",), ())
    assert not box


def test_a_message_has_room_for_so_many_keys() -> None:
    """Stores, pinned chunks, leases, used, missed and unstored keys together."""
    box = outbox()
    assert box.has_room(MAX_KEYS)
    box.use([b"k"] * (MAX_KEYS - 4), 0, Label.NONE)
    box.pin(1, 1000, [1], [1])
    box.miss([b"k"])
    box.leave_out([b"k"])
    assert box.has_room(1)
    assert not box.has_room(2)
    sent(box, 1)
    assert box.has_room(MAX_KEYS)


def test_the_largest_step_fits_a_message() -> None:
    """As many keys and as many bytes of descriptions as an outbox takes; no byte more is taken."""
    box = outbox()
    size = MAX_DESCRIBED_BYTES // MAX_KEYS
    assert box.has_description_room(MAX_DESCRIBED_BYTES)
    for n in range(MAX_KEYS):
        box.start_store(n.to_bytes(MAX_KEY_BYTES, "little"), n, 2**63, (1, 1), bytes(size))
    assert not box.has_description_room(1)
    assert not box.has_room(1)
    WIRE.encode(sent(box, 1))
    assert box.has_description_room(MAX_DESCRIBED_BYTES)


def test_the_largest_step_of_leases_fits_a_message() -> None:
    """One that pins as many leases as it can beside one chunk with all the descriptions' bytes."""
    box = outbox()
    pieces = MAX_DESCRIBED_BYTES // MAX_DESCRIPTION_BYTES
    for n in range(pieces):
        box.start_store(b"%048d" % n, n, 2**63, WHOLE, bytes(MAX_DESCRIPTION_BYTES))
    for lease in range(MAX_KEYS - pieces):
        box.pin(2**62 + lease, 600_000, [2**31], [2**63])
    assert not box.has_room(1)
    WIRE.encode(sent(box, 1))
