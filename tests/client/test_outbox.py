"""What a scheduler has decided becomes one message, in the order in which it is carried out."""

from kvd_client.outbox import MAX_DESCRIBED_BYTES, Outbox
from kvd_proto.codec import WIRE
from kvd_proto.descriptions import MAX_DESCRIPTION_BYTES
from kvd_proto.messages import MAX_KEY_BYTES, MAX_KEYS, Step

WHOLE = (0, 2)


def outbox() -> Outbox:
    """For chunks of two blocks."""
    return Outbox(2)


def sent(box: Outbox, request: int) -> Step:
    """What is to be told, as this request."""
    step, given = box.take(7)
    box.on_sent(request, given)
    return step


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
