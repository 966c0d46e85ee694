"""The control page: numbers in memory that a worker and its lane share.

All are u64, little-endian and aligned, so that no half of a number is read. Word 0
is the timeline. Each of those that follow is the epoch of one store at a time: a store
names its word and the number that stood there when it was sent, and is void as
soon as another one does; the lane looks after each copy, before it reports. So a
worker can take a store's blocks back at any moment, without a message that has to
arrive and without touching its other jobs, and a store that may have read blocks in
use for something else never becomes READY. A word can serve the next store at once:
what the lane may still do for the old one carries the old number.

The last words are the only ones that the lane writes: how many layers of a load have arrived, for
loads that ask for it by the number of such a word. The worker sets it to 0 before it sends the
load, and reads it while the load is under way. They are never used for stores, whose epochs must
not come back.
"""

import mmap

CONTROL_BYTES = 64 * 1024
CONTROL_WORDS = CONTROL_BYTES // 8
TIMELINE_WORD = 0
PROGRESS_WORDS = 1024
EPOCH_WORDS = CONTROL_WORDS - PROGRESS_WORDS  # the timeline among them


class ControlWords:
    """The words of a control page, over memory that is shared.

    Args:
        memory: at least `CONTROL_BYTES`, writable where words are written.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        # Item access of a "Q" view reads or writes its eight bytes at once.
        self._words = memoryview(memory).cast("Q")

    @property
    def timeline(self) -> int:
        """The number that has been reached."""
        return self._words[TIMELINE_WORD]

    @timeline.setter
    def timeline(self, number: int) -> None:
        self._words[TIMELINE_WORD] = number

    def epoch(self, word: int) -> int:
        """The number at a word; a store that was sent with another one is void."""
        return self._words[word]

    def next_epoch(self, word: int) -> None:
        """Void the store whose word this is."""
        self._words[word] += 1

    def layers(self, number: int) -> int:
        """How many layers have arrived, at a load's progress word: 1 to `PROGRESS_WORDS`."""
        return self._words[EPOCH_WORDS + number - 1]

    def set_layers(self, number: int, layers: int) -> None:
        """Set a progress word: the worker to 0, its lane to what has arrived."""
        self._words[EPOCH_WORDS + number - 1] = layers

    def unmap(self) -> None:
        """Unmap the page; its words cannot be used afterwards."""
        self._words.release()
        self.memory.close()
