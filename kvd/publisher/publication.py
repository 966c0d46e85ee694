"""What is published of one namespace, on the topics of the engines that share it.

Directory and ring are read once for all of them. A topic that is due is told everything from the
beginning, piece by piece, while what changes meanwhile goes out at once, to it as to the others. A
change may be of a block whose parent this topic has not been told yet, so all of these changes are
said once more at the end. Whatever is said again is taken back in the same breath: Dynamo counts
how often a block was stored, and takes it out only when it was removed as often.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvd.publisher.topics import Topic
from kvd.publisher.wire import MAX_HASHES, Message, encode_event
from kvd_proto.announcements import Announcement, RemovedBlocks, StoredBlocks
from kvd_proto.announcer import Announcer
from kvd_proto.change_reader import ChangeReader
from kvd_proto.descriptions import DescriptionsView
from kvd_proto.directory import DirectoryView

log = logging.getLogger("kvd.publisher")
CHANGES_AT_ONCE = 250
PIECE = 256
"""Chunks that a turn tells on all topics that are told everything. The loop pauses between turns
with nothing else to do, so that a subscriber keeps up: some 25,000 chunks a second."""


@dataclass(slots=True)
class Telling:
    """Everything, on its way to some topics.

    rest: what has not been told yet.
    meanwhile: events of the changes that were published since it began.
    """

    topics: list[Topic]
    rest: Iterator[StoredBlocks]
    meanwhile: list[bytes] = field(default_factory=list)


class Publication:
    """The changes of one namespace, as messages.

    Args:
        directory: of the namespace.
        descriptions: of its chunks; None: there are none.
        clock: CLOCK_MONOTONIC in ns, by which changes are dated.
        locality: of what lies in tiers; None: some are near and some are not.

    Attributes:
        topics: by the names of the engines whose they are.
        published: changes so far.
    """

    def __init__(
        self,
        directory: DirectoryView,
        descriptions: DescriptionsView | None,
        clock: Callable[[], int],
        locality: str | None = None,
    ) -> None:
        self._locality = locality
        self._reader = ChangeReader(clock)
        self._reader.follow(directory)
        self._announcer = Announcer(
            lambda place: (
                None if descriptions is None else descriptions.read(place.slot, place.generation)
            )
        )
        self._telling: Telling | None = None
        self.topics: dict[str, Topic] = {}
        self.published = 0

    @property
    def snapshots(self) -> int:
        """How often the directory was looked through."""
        return self._reader.snapshots

    @property
    def overruns(self) -> int:
        """How often the ring was overwritten before it was read."""
        return self._reader.overruns

    def take_lag(self) -> int:
        """Return the longest time in ns from a change until it was read, since the last call."""
        return self._reader.take_lag()

    @property
    def behind(self) -> bool:
        """Whether there are changes that `turn` has not returned yet."""
        return self._reader.waiting or self._announcer.waiting

    def turn(self, now: float) -> list[Message]:
        """Return what is to be sent now, a bounded amount."""
        if self._telling is None:
            self._begin(now)
        return [*self._changes(), *self._piece()]

    def _changes(self) -> list[Message]:
        differences = self._reader.take(CHANGES_AT_ONCE)
        if not differences and not self._announcer.waiting:
            return []
        self.published += len(differences)
        blocks = self._announcer.announce(differences)
        events = list(map(self._encode, blocks))
        if self._telling is not None:
            self._telling.meanwhile += self._again(blocks)
        return [each for topic in self.topics.values() for each in topic.messages(events)]

    def _begin(self, now: float) -> None:
        due = [topic for topic in self.topics.values() if topic.ready(now)]
        for topic in due:
            topic.due, topic.told_at = False, now
        if due:
            self._telling = Telling(due, self._announcer.everything())

    def _piece(self) -> list[Message]:
        telling = self._telling
        if telling is None:
            return []
        size = max(1, PIECE // max(1, len(telling.topics)))
        events = self._again(list(islice(telling.rest, size)))
        if not events:
            events, self._telling = telling.meanwhile, None
        return [each for topic in telling.topics for each in topic.messages(events)]

    def withdraw(self, engine: str) -> tuple[Topic, list[Message]]:
        """Return the topic of an engine that leaves, and what takes back all that it has said."""
        topic = self.topics.pop(engine)
        if self._telling is not None and topic in self._telling.topics:
            self._telling.topics.remove(topic)
        return topic, topic.messages(self._removals())

    def _removals(self) -> Iterator[bytes]:
        hashes: dict[tuple[int, bool], list[bytes]] = {}
        for group, block_hash, below in self._announcer.announced:
            hashes.setdefault((group, below), []).append(block_hash)
        for (group, below), gone in hashes.items():
            for begin in range(0, len(gone), MAX_HASHES):
                part = tuple(gone[begin : begin + MAX_HASHES])
                yield self._encode(RemovedBlocks(part, group, below))

    def _encode(self, blocks: Announcement) -> bytes:
        return encode_event(blocks, self._locality)

    def _again(self, blocks: Sequence[Announcement]) -> list[bytes]:
        """Return the events that say these blocks once more: stored ones are taken back before.

        But those without tokens, which no router counts: they are another tier of a block that a
        router knows, and one that was told that they are gone may know it no more.
        """
        events = []
        for each in blocks:
            if isinstance(each, StoredBlocks) and each.tokens:
                events.append(self._encode(RemovedBlocks(each.hashes, each.group, each.below)))
            events.append(self._encode(each))
        return events

    def __repr__(self) -> str:
        return f"<Publication on {list(self.topics.values())} of {self._reader!r}>"
