"""What happened to the chunks of a namespace, counted where it is decided."""

from dataclasses import dataclass

from kvd.errors import IntegrityError
from kvd_proto.answers import StoreAnswer

_ACCEPTED, _PRESENT = int(StoreAnswer.ACCEPTED), int(StoreAnswer.PRESENT)
_PENDING, _FULL = int(StoreAnswer.PENDING), int(StoreAnswer.FULL)
_NOT_YET, _BAD_KEY = int(StoreAnswer.NOT_YET), int(StoreAnswer.BAD_KEY)
_QUOTA = int(StoreAnswer.QUOTA)


@dataclass(slots=True)
class Counters:
    """Events of one namespace since it was opened.

    offered = accepted + present + pending + full + quota + not_yet + bad_key + draining, all of
    them keys of PREPARE_STORE; asked = hits + misses.
    """

    offered: int = 0  # keys of PREPARE_STORE
    accepted: int = 0  # of `offered`, by answer
    present: int = 0
    pending: int = 0
    full: int = 0
    quota: int = 0  # the model holds what its cap allows, and none of it may go
    not_yet: int = 0
    bad_key: int = 0
    draining: int = 0  # of `offered`: the daemon took no new chunks
    index_full: int = 0  # of `full`: the index had no room near the key's home
    restored: int = 0  # chunks of the previous daemon
    stored: int = 0  # chunks that became READY
    replaced: int = 0  # chunks that a fuller store of their key took the place of
    dropped: int = 0  # stores given up, whatever the reason
    tickets_expired: int = 0  # of `dropped`: the deadline passed
    stale_reports: int = 0  # shares and revocations of slots that had moved on
    evicted: int = 0  # chunks evicted to make room for this namespace
    yielded: int = 0  # chunks evicted to make room for another one, or to come down to a cap
    reset: int = 0  # chunks dropped by a reset
    removed: int = 0  # chunks that an operator dropped
    asked: int = 0  # keys of PREPARE_LOAD
    hits: int = 0  # of `asked`
    misses: int = 0
    leases: int = 0
    leases_expired: int = 0

    def count_answers(self, answers: bytearray) -> None:
        """Keys were offered and answered so, a `StoreAnswer` each."""
        self.offered += len(answers)
        self.accepted += answers.count(_ACCEPTED)
        self.present += answers.count(_PRESENT)
        self.pending += answers.count(_PENDING)
        self.full += answers.count(_FULL)
        self.quota += answers.count(_QUOTA)
        self.not_yet += answers.count(_NOT_YET)
        self.bad_key += answers.count(_BAD_KEY)

    def check_integrity(self) -> None:
        """Every key that was offered or asked for has been answered, once.

        Raises:
            IntegrityError: otherwise.
        """
        refused = self.full + self.quota + self.not_yet + self.bad_key + self.draining
        answered = self.accepted + self.present + self.pending + refused
        if self.offered != answered or self.asked != self.hits + self.misses:
            raise IntegrityError(f"keys that were offered or asked for and not answered: {self}")
