"""Answers that broker and client share: per key of a lookup, per key of a store."""

from enum import IntEnum


class LookupResult(IntEnum):
    """What the directory says about a key. A hint: only a lease is the truth."""

    MISS = 0  # it is not there
    HIT = 1  # READY: every rank's share is there
    HIT_PENDING = 2  # somebody is writing it


class StoreAnswer(IntEnum):
    """What `PREPARE_STORE` says about a key; stable numbers of the wire."""

    ACCEPTED = 1  # a slot is given; write it
    PRESENT = 2  # READY already; nothing to do
    PENDING = 3  # somebody is writing it, perhaps this engine; nothing to do
    FULL = 4  # no room: everything is pinned, being written, or named in the same request
    NOT_YET = 5  # not offered often enough to be worth a slot; offer it next time
    BAD_KEY = 6  # empty or longer than a key may be
    QUOTA = 7  # the model holds what its cap allows, and none of it may go
