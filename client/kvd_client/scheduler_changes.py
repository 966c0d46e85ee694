"""What a scheduler's engine publishes: which chunks come and go, and what they are."""

from kvd_client.arguments import shown, whole
from kvd_client.change_reader import DEFAULT_LIMIT, Differences, Place
from kvd_client.errors import UsageError
from kvd_client.scheduler_session import SchedulerSession
from kvd_proto.changes import MAX_CHANGES
from kvd_proto.descriptions import Description


class SchedulerChanges(SchedulerSession):
    """What a `Scheduler` has for KV events; its arguments are that one's."""

    @property
    def describes(self) -> bool:
        """Whether `prepare_store` is to be given descriptions.

        True where the scheduler was made with `events=True` and the namespace it is attached to
        keeps descriptions; otherwise `prepare_store` leaves them out. It may change whenever the
        engine is attached.
        """
        attachment = self._attachment
        return self._events and attachment is not None and attachment.descriptions is not None

    def take_changes(self, limit: int = DEFAULT_LIMIT) -> Differences:
        """Return which chunks have become READY since the last call, and which are not any more.

        And which ones lie in tiers now, and which in none any more.

        All differences returned so far add up to what a lookup finds, whichever engine stored or
        dropped the chunks. A reset takes all of it back. While the engine is not attached nothing
        changes, for `ABSENT_SECONDS`; then all is taken back. Read in this thread, from shared
        memory: it never waits. Each change is returned once.

        Args:
            limit: changes that are read at most: there may be more of them, see `changes_waiting`.
        """
        most = whole("limit", limit, 1, MAX_CHANGES)
        self._check_open()
        return self._changes.take(most)

    @property
    def changes_waiting(self) -> bool:
        """Whether `take_changes` would find something to do."""
        return self._changes.waiting

    @property
    def changes_behind(self) -> bool:
        """Whether the last `take_changes` has left something that was there when it began."""
        return self._changes.behind

    def repeat_changes(self) -> None:
        """Let `take_changes` return all that is READY anew, as if it had returned nothing yet.

        Call it after routers were told that nothing is cached.
        """
        self._check_open()
        self._changes.repeat()

    def description(self, place: Place) -> Description | None:
        """Return how the chunk was described that `take_changes` has found at this place.

        None: not at all, or the chunk is not there any more.
        """
        if not isinstance(place, Place):
            raise UsageError(f"place={shown(place)}: pass one that take_changes returned")
        return self._changes.description(place)
