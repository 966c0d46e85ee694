"""The control page: numbers in memory that a worker writes and its lane reads.

All are u64, little-endian and aligned, so that nobody reads half a number. Word 0
is the timeline. Each of the others is the epoch of one store at a time: a store
names its word and the number that stood there when it was sent, and is void as
soon as another one does. So a worker can take a store's blocks back at any moment,
without a message and without touching its other jobs.
"""

CONTROL_BYTES = 64 * 1024
CONTROL_WORDS = CONTROL_BYTES // 8
TIMELINE_WORD = 0
