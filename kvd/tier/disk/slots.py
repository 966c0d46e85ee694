"""The index of chunks by slot, its rebuild from records, and the eviction policy. No I/O.

Slots of one size form a size class over their slabs, on which CLOCK evicts: its hand takes slots of
chunks not accessed since its last visit, and passes over the others once. CLOCK is FIFO with lazy
promotion (Yang et al., "FIFO can be better than LRU: the power of lazy promotion and quick
demotion", HotOS 2023). So adjacent slots are freed together, and written in one call.

Between sizes: if a slab of another size was last used before the chunk that the hand would evict,
that whole slab is dropped instead, so unused chunks of one model do not occupy space for good.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvd.errors import IntegrityError
from kvd.tier.disk.slabs import (
    BUSY,
    DOOMED,
    FREE,
    HELD,
    MAX_SLOTS,
    RECORD,
    Record,
    Records,
    Slab,
    possible,
)

_MAX_SPARED = 4096  # accessed chunks that one call passes over, since the lock is held
KeyPlaces: TypeAlias = dict[bytes, int]
"""Places by key; see `place_of`."""
TakenSlot: TypeAlias = tuple[Slab, int]
"""A BUSY slot: its owner writes a chunk into it, or erases its record and frees it.

Its slab, which may be dropped meanwhile, and its number there.
"""


def place_of(slab: int, slot: int) -> int:
    """Return a slot's place: slab and slot as one number."""
    return slab * MAX_SLOTS + slot


def split(place: int) -> tuple[int, int]:
    """Return the numbers of slab and slot of a place."""
    return divmod(place, MAX_SLOTS)


@dataclass(slots=True)
class SizeClass:
    """The slots of one size: slabs in order of creation, free places, CLOCK's hand."""

    slabs: list[Slab] = field(default_factory=list)
    free: deque[int] = field(default_factory=deque)
    hand_slab: int = 0  # index in `slabs`
    hand_slot: int = 0
    num_slots: int = 0

    def add(self, slab: Slab) -> None:
        """Append a slab."""
        self.slabs.append(slab)
        self.num_slots += slab.num_slots

    def step(self) -> tuple[Slab, int]:
        """Return the slot at the hand, and advance the hand."""
        slab, slot = self.slabs[self.hand_slab], self.hand_slot
        self.hand_slot += 1
        if self.hand_slot == slab.num_slots:
            self.hand_slot, self.hand_slab = 0, (self.hand_slab + 1) % len(self.slabs)
        return slab, slot

    def set_hand(self, place: int) -> None:
        """Move the hand to the slot after a place."""
        number, slot = split(place)
        self.hand_slab = next(i for i, slab in enumerate(self.slabs) if slab.number == number)
        self.hand_slot = slot
        self.step()

    def remove(self, slab: Slab) -> None:
        """Remove a slab, with its free places."""
        index = self.slabs.index(slab)
        self.slabs.remove(slab)
        self.num_slots -= slab.num_slots
        if index < self.hand_slab:
            self.hand_slab -= 1
        elif index == self.hand_slab:
            self.hand_slot = 0
        if self.hand_slab >= len(self.slabs):
            self.hand_slab = self.hand_slot = 0
        self.free = deque(place for place in self.free if split(place)[0] != slab.number)


class SlotIndex:
    """All slabs and the chunks in them. The owner holds one lock around each call.

    Attributes:
        slabs: by number.
        spaces: places of chunks by space id; a put needs the entry of its space.
        sequence: number of the latest put or get.
        nbytes: bytes of all slabs' files.
    """

    def __init__(
        self, slabs: Sequence[Slab] = (), spaces: Mapping[bytes, KeyPlaces] | None = None
    ) -> None:
        self.slabs = {slab.number: slab for slab in slabs}
        self.spaces = dict(spaces or {})
        self.nbytes = sum(slab.nbytes for slab in slabs)
        self.sequence = max((slab.used for slab in slabs), default=0)
        self._size_classes: dict[int, SizeClass] = {}
        self._readers: dict[int, int] = {}
        self._dropped: dict[bytes, list[bytes]] = {}
        for slab in slabs:
            size_class = self._size_classes.setdefault(slab.slot_bytes, SizeClass())
            size_class.add(slab)
            states = np.frombuffer(slab.states, "u1")
            size_class.free.extend(
                (place_of(slab.number, 0) + np.flatnonzero(states == FREE)).tolist()
            )
        for size_class in self._size_classes.values():
            latest = max(size_class.slabs, key=lambda slab: slab.used)
            is_held = np.frombuffer(latest.states, "u1") == HELD
            slot = int(np.argmax(np.where(is_held, latest.records["sequence"], 0)))
            size_class.set_hand(place_of(latest.number, slot))

    # ------------------------------------------------------------ usage

    def usage(self) -> tuple[int, int]:
        """Return the number of chunks, and the bytes of their slots."""
        pairs = [(slab.states.count(HELD), slab.slot_bytes) for slab in self.slabs.values()]
        return sum(n for n, _ in pairs), sum(n * nbytes for n, nbytes in pairs)

    def take_dropped(self) -> list[tuple[bytes, list[bytes]]]:
        """Return, by space id, the keys evicted or lost since the last call."""
        dropped, self._dropped = self._dropped, {}
        return list(dropped.items())

    # ------------------------------------------------------------ slabs

    def add(self, slab: Slab) -> None:
        """Add a new slab; all of its slots are free."""
        self.slabs[slab.number] = slab
        self.nbytes += slab.nbytes
        size_class = self._size_classes.setdefault(slab.slot_bytes, SizeClass())
        size_class.add(slab)
        size_class.free.extend(
            range(place_of(slab.number, 0), place_of(slab.number, slab.num_slots))
        )
        slab.used = self.sequence

    def drop(self, slab: Slab) -> None:
        """Drop a slab with its chunks; `free` and `unpin` then only lower its pins.

        Reads and writes there may still be under way.
        """
        if self.slabs.pop(slab.number, None) is None:
            return
        self.nbytes -= slab.nbytes
        self._size_classes[slab.slot_bytes].remove(slab)
        if not self._size_classes[slab.slot_bytes].slabs:
            del self._size_classes[slab.slot_bytes]
        for slot in range(slab.num_slots):
            if slab.states[slot] == HELD:
                self._forget(slab, slot)
                slab.states[slot] = FREE

    def oldest_idle(self, for_slot_bytes: int = 0) -> Slab | None:
        """Return the least recently used slab without reads or writes under way; None if none is.

        If room is needed for slots of `for_slot_bytes`, their slabs are exempt, and others must
        have been used before the chunk that the hand of these slots comes to next.
        """
        limit = self._next_use(self.size_class(for_slot_bytes))
        slabs = (slab for slab in self.slabs.values() if slab.slot_bytes != for_slot_bytes)
        idle = [slab for slab in slabs if not slab.pins]
        oldest = min(idle, key=lambda slab: slab.used, default=None)
        if oldest is None or (limit is not None and oldest.used >= limit):
            return None
        return oldest

    def _next_use(self, size_class: SizeClass) -> int | None:
        """Return the sequence of the chunk that the hand comes to next; None if there is none."""
        slot = size_class.hand_slot
        # The hand's slab comes last again, for the slots before the hand.
        for slab in (
            *size_class.slabs[size_class.hand_slab :],
            *size_class.slabs[: size_class.hand_slab + 1],
        ):
            held_slot = slab.states.find(HELD, slot)
            if held_slot >= 0:
                return slab.record(held_slot).sequence
            slot = 0
        return None

    # ------------------------------------------------------------ slots to write

    def size_class(self, slot_bytes: int) -> SizeClass:
        """Return the slots of this size; an empty one if there are no such slots."""
        return self._size_classes.get(slot_bytes) or SizeClass()

    def take_free(self, slot_bytes: int, count: int) -> list[TakenSlot]:
        """Take up to `count` free slots to write to, in the order in which they became free."""
        size_class = self.size_class(slot_bytes)
        return [
            self._take(size_class.free.popleft()) for _ in range(min(count, len(size_class.free)))
        ]

    def evict(self, slot_bytes: int, count: int) -> list[TakenSlot]:
        """Evict up to `count` chunks, and take their slots to write to."""
        size_class = self.size_class(slot_bytes)
        taken: list[TakenSlot] = []
        num_spared = 0
        for _ in range(2 * size_class.num_slots):
            if len(taken) == count:
                break
            slab, slot = size_class.step()
            place = place_of(slab.number, slot)
            if slab.states[slot] != HELD or place in self._readers:
                continue
            if slab.visited[slot] and num_spared < _MAX_SPARED:
                slab.visited[slot] = 0
                num_spared += 1
                continue
            self._forget(slab, slot)
            taken.append(self._take(place))
        return taken

    def _take(self, place: int) -> TakenSlot:
        number, slot = split(place)
        slab = self.slabs[number]
        slab.states[slot], slab.visited[slot] = BUSY, 0
        slab.pins += 1
        return slab, slot

    def next_sequences(self, count: int) -> int:
        """Reserve `count` sequence numbers for puts; return the first."""
        self.sequence += count
        return self.sequence - count + 1

    def enter(self, slab: Slab, slot: int, record: Record) -> TakenSlot | None:
        """Enter the chunk of a taken slot, after its record was written.

        Returns:
            A slot to erase and free, or None: the slot that held the key before, as `remove`
            returns it; or this one, if the space was dropped meanwhile.
        """
        places = self.spaces.get(record.space)
        if places is None and slab.number in self.slabs:
            return slab, slot
        slab.pins -= 1
        if places is None or slab.number not in self.slabs:
            return None
        previous = self.remove(record.space, record.key)
        places[record.key] = place_of(slab.number, slot)
        slab.states[slot] = HELD
        slab.used = max(slab.used, record.sequence)
        return previous

    def free(self, slab: Slab, slot: int) -> None:
        """Free a taken slot; its record has been erased."""
        slab.pins -= 1
        if slab.number in self.slabs:
            self._set_free(slab, slot)

    # ------------------------------------------------------------ chunks

    def find(self, space: bytes, key: bytes) -> tuple[Slab, int, Record] | None:
        """Return a chunk's slab, slot and record; None if it is not held."""
        place = self.spaces.get(space, {}).get(key)
        if place is None:
            return None
        number, slot = split(place)
        slab = self.slabs[number]
        return slab, slot, slab.record(slot)

    def holds(self, slab: Slab, slot: int, record: Record) -> bool:
        """Return whether the index has the record's chunk in this slot."""
        place = place_of(slab.number, slot)
        return self.spaces.get(record.space, {}).get(record.key) == place

    def pin(self, slab: Slab, slot: int) -> None:
        """Protect a HELD slot from reuse while it is read, and mark it as accessed."""
        place = place_of(slab.number, slot)
        self._readers[place] = self._readers.get(place, 0) + 1
        slab.visited[slot] = 1
        slab.pins += 1
        slab.used = self.sequence = self.sequence + 1

    def unpin(self, slab: Slab, slot: int) -> TakenSlot | None:
        """End a read.

        Returns:
            The slot, if its chunk was dropped meanwhile: as `remove` returns it. Else None.
        """
        place = place_of(slab.number, slot)
        self._readers[place] -= 1
        slab.pins -= 1
        if self._readers[place]:
            return None
        del self._readers[place]
        if slab.states[slot] != DOOMED or slab.number not in self.slabs:
            return None
        return self._take(place)

    def drop_unreadable(self, slab: Slab, slot: int) -> None:
        """Drop the chunk of a pinned slot that cannot be read."""
        if slab.number in self.slabs and slab.states[slot] == HELD:
            self._forget(slab, slot)
            slab.states[slot] = DOOMED

    def remove(self, space: bytes, key: bytes) -> TakenSlot | None:
        """Drop a chunk.

        Returns:
            Its slot, taken: erase its record, then call `free`. None if the chunk is not
            held, or still being read.
        """
        place = self.spaces.get(space, {}).pop(key, None)
        return None if place is None else self._take_unless_read(place)

    def drop_space(self, space: bytes) -> list[int]:
        """Drop all chunks of a space; return their places, for `take_space` in several calls."""
        return sorted(self.spaces.pop(space, {}).values())

    def take_space(self, places: Sequence[int]) -> list[TakenSlot | None]:
        """Take the slots of a dropped space's chunks, to be erased and freed.

        Slots that have got an indexed chunk meanwhile are left out. None stands for a slot that is
        still read: `unpin` returns it later.
        """
        taken: list[TakenSlot | None] = []
        for place in places:
            number, slot = split(place)
            slab = self.slabs.get(number)
            if slab is not None and slab.states[slot] == HELD:
                space, key = slab.owner(slot)
                if self.spaces.get(space, {}).get(key) != place:
                    taken.append(self._take_unless_read(place))
        return taken

    def _take_unless_read(self, place: int) -> TakenSlot | None:
        """Take a slot whose chunk is not indexed; if it is read, mark it DOOMED instead."""
        if place not in self._readers:
            return self._take(place)
        number, slot = split(place)
        self.slabs[number].states[slot] = DOOMED
        return None

    def _set_free(self, slab: Slab, slot: int) -> None:
        slab.states[slot] = FREE
        self._size_classes[slab.slot_bytes].free.append(place_of(slab.number, slot))

    def check_integrity(self) -> None:
        """Compare places, free lists, pins and bytes with the states of all slots.

        Raises:
            IntegrityError: they differ.
        """
        slabs = self.slabs.values()
        if self.nbytes != sum(slab.nbytes for slab in slabs):
            raise IntegrityError(f"{self.nbytes} bytes are counted for {len(slabs)} slabs")
        indexed = [place for places in self.spaces.values() for place in places.values()]
        free = [place for size_class in self._size_classes.values() for place in size_class.free]
        for name, places, state in (("indexed", indexed, HELD), ("free", free, FREE)):
            if sorted(places) != self._places_in(state):
                raise IntegrityError(f"the {name} places are not the slots in state {state}")
        for space, key_places in self.spaces.items():
            for key, place in key_places.items():
                number, slot = split(place)
                if self.slabs[number].owner(slot) != (space, key):
                    raise IntegrityError(f"slot {slot} of slab {number} is of another chunk")
        for slab in slabs:
            first = place_of(slab.number, 0)
            readers = sum(self._readers.get(first + slot, 0) for slot in range(slab.num_slots))
            if slab.pins != readers + slab.states.count(BUSY):
                raise IntegrityError(f"slab {slab.number} has {slab.pins} pins, {readers} readers")

    def _places_in(self, state: int) -> list[int]:
        return sorted(
            place_of(slab.number, slot)
            for slab in self.slabs.values()
            for slot in range(slab.num_slots)
            if slab.states[slot] == state
        )

    def _forget(self, slab: Slab, slot: int) -> None:
        """Remove the chunk of a slot from the index, and report its key as dropped."""
        space, key = slab.owner(slot)
        places = self.spaces.get(space, {})
        if places.get(key) == place_of(slab.number, slot):  # otherwise its space was dropped
            del places[key]
            self._dropped.setdefault(space, []).append(key)


def rebuild(slabs: Sequence[Slab]) -> tuple[dict[bytes, KeyPlaces], list[int], int]:
    """Index the chunks in slabs by their records, and mark their slots as HELD.

    Returns:
        - the places of keys, by space id;
        - places to erase: of damaged records, and of older records of the same key;
        - how many of these are damaged, i.e. not `possible`.
    """
    spaces: dict[bytes, KeyPlaces] = {}
    by_number = {slab.number: slab for slab in slabs}
    to_erase: list[int] = []
    for slab in slabs:
        records = slab.records
        is_possible = possible(records)
        damaged = np.flatnonzero((records["sequence"] > 0) & ~is_possible)
        to_erase += (place_of(slab.number, 0) + damaged).tolist()
        slab.used = int(records["sequence"][is_possible].max(initial=0))
        np.frombuffer(slab.states, "u1")[is_possible] = HELD
    num_damaged = len(to_erase)
    for slab in slabs:
        slots = np.flatnonzero(np.frombuffer(slab.states, "u1") == HELD)
        ids, id_indices = np.unique(slab.records["space"][slots], return_inverse=True)
        for i, id_ in enumerate(ids):
            places = spaces.setdefault(id_.tobytes(), {})
            to_erase += _enter(places, slab, slots[id_indices == i], by_number)
    for place in to_erase:
        number, slot = split(place)
        by_number[number].states[slot] = FREE
    return spaces, to_erase, num_damaged


def _enter(
    places: KeyPlaces, slab: Slab, slots: npt.NDArray[np.int64], by_number: Mapping[int, Slab]
) -> list[int]:
    """Enter chunks of one space; return the places of older chunks of the same keys."""
    new_places = (place_of(slab.number, 0) + slots).tolist()
    older: list[int] = []  # left by a process that died before it erased the older record
    for key, place in zip(_keys(slab.records[slots]), new_places, strict=True):
        entered = places.setdefault(key, place)
        if entered != place:
            latest = max(place, entered, key=lambda p: _sequence(by_number, p))
            older.append(place + entered - latest)
            places[key] = latest
    return older


def _sequence(by_number: Mapping[int, Slab], place: int) -> int:
    number, slot = split(place)
    return by_number[number].record(slot).sequence


def chunks_of(
    slab: Slab, space: bytes
) -> tuple[list[bytes], list[tuple[int, int, int]], list[int]]:
    """Return keys, coverages and places of a space's records in a slab, whether HELD or not."""
    records = np.frombuffer(bytes(slab.mirror), RECORD)
    slots = np.flatnonzero((records["sequence"] > 0) & (records["space"] == np.void(space)))
    space_records = records[slots]
    columns = [space_records[name].tolist() for name in ("first", "count", "group")]
    places = (place_of(slab.number, 0) + slots).tolist()
    return _keys(space_records), list(zip(*columns, strict=True)), places


def _keys(records: Records) -> list[bytes]:
    pairs = zip(records["key"].tolist(), records["key_len"].tolist(), strict=True)
    return [key[:length] for key, length in pairs]
