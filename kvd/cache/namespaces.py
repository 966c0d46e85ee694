"""Every namespace of the daemon, in one pool.

A namespace outlives its engines, so that the next engine of the same model finds
its chunks. It ends when it is closed: by the operator, or to make room for
another one when `max_namespaces` are open. A temporary one, as that of a self-test, is nobody
else's, takes narrow columns, and goes with its last engine.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvd.cache.chunks import ChunkTable
from kvd.cache.directory import DirectoryWriter, Refs
from kvd.cache.ledger import Ledger, LedgerDescription, ledger_bytes
from kvd.cache.recovery import PoolTrailer, ResetTable
from kvd.cache.stores import MakeDescriptions
from kvd.config.settings import Settings
from kvd.config.values import parse_tiers
from kvd.errors import KvdError, LedgerDamaged, Refusal
from kvd.metrics.counts import ChunkCounts
from kvd.pool.geometry import COLUMN_EXTENTS, FillOrder, Geometry
from kvd.pool.pool import Pool
from kvd_proto.changes import change_capacity
from kvd_proto.directory import MAX_SLOTS, DirectoryHeader
from kvd_proto.messages import ErrorCode, ResetDone
from kvd_proto.tier_table import tier_table_capacity

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MakeBuffer = Callable[[str, int], "WriteableBuffer"]


@dataclass(frozen=True, slots=True)
class LedgerSetup:
    """Where and how chunks are kept for the next daemon.

    make_buffer: makes zero-filled memory that outlives the daemon; as that of a directory.
    pool: names the pool, so that no ledger is ever read beside another one.
    trailer: of the pool, which has the number of each ledger's last change.
    generation_base: greater than every generation that a daemon before this one gave.
    """

    make_buffer: MakeBuffer
    pool: str
    trailer: PoolTrailer
    generation_base: int


def _in_words(geometry: Geometry) -> str:
    same = ", all holding the same bytes" if geometry.replicated else ""
    blocks = geometry.blocks_per_chunk
    return (
        f"slots of {geometry.slot_bytes} bytes and {blocks} blocks for"
        f" {geometry.world_size} ranks{same}"
    )


def _sum(sizes: Iterable[int | None]) -> int | None:
    """The sum, or None where one is not known."""
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total


@dataclass(slots=True, eq=False)
class Namespace:
    """Chunks that may be shared, and where they lie.

    id: 16 bytes.
    label: a name for people.
    temporary: it has no share of the pool that others must leave to it.
    engines: how many are attached.
    tokens_per_chunk: None where it is not known or the groups differ.
    reuse_threshold: a key gets a slot at its n-th offer.
    salt: of its last reset, as the reset file has it; empty where none is known. What tiers keep
        of another one is not used. It stays empty where the namespace is temporary.
    """

    id: bytes
    label: str
    table: ChunkTable
    temporary: bool = False
    engines: int = 0
    tokens_per_chunk: int | None = None
    reuse_threshold: int = 1
    salt: bytes = b""

    @property
    def geometry(self) -> Geometry:
        """Slot sizes, arenas and number of slots."""
        return self.table.space.geometry

    @property
    def directory(self) -> DirectoryWriter:
        """The directory that clients and lanes read."""
        return self.table.directory

    def __repr__(self) -> str:
        return (
            f"<Namespace {self.id.hex()[:8]} {self.label!r}, {self.engines} engines,"
            f" {self.table!r}>"
        )


class Namespaces:
    """The namespaces that are open.

    Args:
        cpu_bytes: the pool's budget.
        settings: of the daemon: policy, quotas and limits.
        boot_id: of this daemon, 16 bytes.
        make_buffer: makes zero-filled memory for a directory, given the namespace's id
            in hex and a size in bytes; it should cost nothing until it is touched.
        make_descriptions: makes what keeps descriptions, or goes on with what there is of the
            daemon before; where it is left out, none are kept.
        drop_buffers: lets go of all that was made for the namespace of this name.
        ledger_setup: how chunks are kept for the next daemon, if they are.
        fill: the order in which the pool's memory comes; where it is left out, the daemon's.
        resets: which namespaces were reset, by this daemon and those before.
    """

    def __init__(
        self,
        cpu_bytes: int,
        settings: Settings,
        *,
        boot_id: bytes,
        make_buffer: MakeBuffer,
        make_descriptions: MakeDescriptions = lambda _name, _record_bytes: None,
        drop_buffers: Callable[[str], None] = lambda _name: None,
        ledger_setup: LedgerSetup | None = None,
        fill: FillOrder | None = None,
        resets: ResetTable | None = None,
    ) -> None:
        self.pool = Pool(cpu_bytes, fill)
        self.resets = ResetTable() if resets is None else resets
        tiers = parse_tiers(settings.tier)
        self._num_tiers = len(tiers)
        self._tier_bytes = _sum(tier.size_bytes for tier in tiers)
        self._boot_id = boot_id
        self._make_buffer = make_buffer
        self._make_descriptions = make_descriptions
        self._drop_buffers = drop_buffers
        self._ledger_setup = ledger_setup
        self._open: dict[bytes, Namespace] = {}
        self.apply_settings(settings)
        self.closed_counts = ChunkCounts()  # of those that are gone: totals never fall

    def apply_settings(self, settings: Settings) -> None:
        """These settings hold from now on; the policy for namespaces that are opened then."""
        self.settings = settings
        self.pool.set_quotas(settings.quotas(self.cpu_bytes))

    def open(
        self,
        ns_id: bytes,
        slot_bytes: tuple[int, ...],
        *,
        world_size: int,
        replicated: bool,
        blocks_per_chunk: int = 1,
        label: str = "",
        temporary: bool = False,
        record_bytes: int = 0,
    ) -> Namespace:
        """The namespace of this id, made where it is not open yet.

        Args:
            ns_id: 16 bytes.
            slot_bytes: bytes of one slot for each rank; one figure where replicated.
            world_size: ranks that hold shares of one chunk.
            replicated: every rank holds the same bytes.
            blocks_per_chunk: blocks of a whole chunk.
            label: a name for people, e.g. the model's.
            temporary: it has no share of the pool that others must leave to it, takes
                room in narrow columns, and is `over` when its last engine is gone.
            record_bytes: of a record for a description (`kvd_proto.descriptions`); 0: of this
                namespace, or of a temporary one, none are kept.

        Raises:
            Refusal: BAD_LAYOUT where the figures contradict each other, an open
                namespace or the budget; LIMIT where too many are open.
        """
        geometry = Geometry(
            tuple(slot_bytes),
            self.pool.extents,
            world_size,
            replicated,
            column_width=1 if temporary else COLUMN_EXTENTS,
            blocks_per_chunk=blocks_per_chunk,
        )
        known = self._open.get(ns_id)
        if known is not None:
            if known.geometry != geometry:
                raise Refusal(
                    ErrorCode.BAD_LAYOUT,
                    f"namespace {ns_id.hex()} is open with {_in_words(known.geometry)},"
                    f" asked for with {_in_words(geometry)}",
                )
        else:
            self._check(geometry)
            try:
                ledger = None if temporary else self._new_ledger(ns_id, label, geometry)
                known = self._add(ns_id, label, geometry, ledger, temporary=temporary)
            except KvdError:
                self._drop_buffers(ns_id.hex())
                raise
        descriptions = known.table.descriptions
        if descriptions.writer is None and record_bytes and not temporary:
            descriptions.writer = self._make_descriptions(ns_id.hex(), record_bytes)
        return known

    def _new_ledger(self, ns_id: bytes, label: str, geometry: Geometry) -> Ledger | None:
        if self._ledger_setup is None:
            return None
        kept = LedgerDescription(
            namespace=ns_id.hex(),
            label=label,
            pool=self._ledger_setup.pool,
            cpu_bytes=self.cpu_bytes,
            slot_bytes=geometry.slot_bytes,
            world_size=geometry.world_size,
            replicated=geometry.replicated,
            blocks_per_chunk=geometry.blocks_per_chunk,
        )
        buffer = self._ledger_setup.make_buffer(ns_id.hex(), ledger_bytes(geometry.num_slots))
        salt = self.resets.salt_of(ns_id.hex())
        return Ledger.create(buffer, geometry.num_slots, kept, self._ledger_setup.trailer, salt)

    def is_outdated(self, ledger: Ledger) -> bool:
        """Whether its namespace may have been reset while another pool was in use."""
        return ledger.salt != self.resets.salt_of(ledger.description.namespace)

    def reopen(self, ledger: Ledger) -> Namespace:
        """Open a namespace of the previous daemon with all chunks of its ledger.

        Raises:
            LedgerDamaged: the ledger cannot be believed.
            IntegrityError: its chunks lie where those of another namespace do.
            In both cases this object is of no use any more.
        """
        kept, pool_id = (
            ledger.description,
            self._ledger_setup.pool if self._ledger_setup is not None else "",
        )
        geometry = Geometry(
            kept.slot_bytes,
            self.pool.extents,
            kept.world_size,
            kept.replicated,
            blocks_per_chunk=kept.blocks_per_chunk,
        )
        if (kept.pool, kept.cpu_bytes) != (pool_id, self.cpu_bytes):
            raise LedgerDamaged(f"it belongs to another pool, of {kept.cpu_bytes} bytes")
        try:
            ns_id = bytes.fromhex(kept.namespace)
            self._check(geometry)
        except (ValueError, ZeroDivisionError, Refusal) as error:
            raise LedgerDamaged(f"its description is invalid: {error}") from error
        if len(ns_id) != 16 or ns_id in self._open or geometry.num_slots != ledger.num_slots:
            raise LedgerDamaged(f"its description is invalid: {kept}")
        namespace = self._add(ns_id, kept.label, geometry, ledger)
        namespace.table.restore(ledger.chunks())
        ledger.renumber()
        return namespace

    def _add(
        self,
        ns_id: bytes,
        label: str,
        geometry: Geometry,
        ledger: Ledger | None,
        *,
        temporary: bool = False,
    ) -> Namespace:
        tiers = 0 if temporary else self._num_tiers  # nobody would come back for what goes down
        size = self._tier_bytes
        chunks = None if size is None else size // geometry.bytes_per_chunk
        header = DirectoryHeader.plan(
            geometry.num_slots,
            ns_id,
            self._boot_id,
            geometry.blocks_per_chunk,
            change_capacity(self.settings.change_ring),
            tier_capacity=tier_table_capacity(chunks) if tiers else 0,
            num_tiers=tiers,
        )
        buffer = self._make_buffer(ns_id.hex(), header.total_bytes)
        base = self._ledger_setup.generation_base if self._ledger_setup is not None else 0
        directory = DirectoryWriter(buffer, header, ledger, base)
        model = "" if temporary else label
        table = ChunkTable(
            directory,
            geometry,
            self.pool,
            self.settings.policy,
            model,
            elsewhere=lambda key: self._is_in_other_layout(ns_id, label, key),
            forecasts=not temporary,
        )
        namespace = self._open[ns_id] = Namespace(
            ns_id,
            label,
            table,
            temporary,
            reuse_threshold=self.settings.reuse_threshold,
            salt=b"" if temporary else self.resets.salt_of(ns_id.hex()),
        )
        return namespace

    def _is_in_other_layout(self, ns_id: bytes, label: str, key: bytes) -> bool:
        """Whether another namespace of the same model has the key."""
        return any(
            other.label == label and other.id != ns_id and other.directory.find(key) >= 0
            for other in self._open.values()
        )

    @property
    def cpu_bytes(self) -> int:
        """The pool's budget."""
        return self.pool.cpu_bytes

    def _check(self, geometry: Geometry) -> None:
        sizes, arenas = geometry.slot_bytes, 1 if geometry.replicated else geometry.world_size
        if len(sizes) != arenas or min(sizes, default=0) < 1:
            raise Refusal(
                ErrorCode.BAD_LAYOUT,
                f"{_in_words(geometry)}: {arenas} sizes above zero are needed",
            )
        if not 1 <= geometry.num_slots <= MAX_SLOTS:
            raise Refusal(
                ErrorCode.BAD_LAYOUT,
                f"a budget of {self.pool.cpu_bytes} bytes holds {geometry.num_slots} chunks of"
                f" {geometry.bytes_per_chunk} bytes; 1 to {MAX_SLOTS} can be served:"
                " change the budget or the blocks per chunk",
            )
        limit = self.settings.max_namespaces
        if len(self._open) >= limit:
            raise Refusal(
                ErrorCode.LIMIT,
                f"{limit} namespaces are open and none may go: raise max_namespaces"
                f" (now {limit}), or end engines that are not needed",
                limit="max_namespaces",
            )

    def attach_engine(self, namespace: Namespace) -> None:
        """An engine uses the namespace now, so it has a fair share of the pool."""
        namespace.engines += 1
        namespace.table.space.active = not namespace.temporary

    def detach_engine(self, namespace: Namespace) -> None:
        """An engine is gone. With the last one the chunks stay until others need the room."""
        namespace.engines -= 1
        namespace.table.space.active = namespace.engines > 0 and not namespace.temporary

    def get(self, ns_id: bytes) -> Namespace | None:
        """The open namespace of this id."""
        return self._open.get(ns_id)

    def __iter__(self) -> Iterator[Namespace]:
        return iter(list(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)

    def reset(
        self, namespace: Namespace, *, by_operator: bool = False
    ) -> tuple[ResetDone, Refs, str]:
        """Drop every chunk of a namespace, also as far as the next daemon is concerned.

        The order holds whenever a kill comes: the file has the new salt first, and the ledger has
        it when no chunk of before counts there. Until then the ledger is not taken over.

        Returns:
            As `ChunkTable.reset`, and why the next daemon may find again what tiers keep; empty
            where it will not.
        """
        lack = ""
        if not namespace.temporary:  # no tier has any of a temporary one
            lack = self.resets.draw(namespace.id.hex())
            namespace.salt = self.resets.salt_of(namespace.id.hex())
        done, slots = namespace.table.reset(by_operator=by_operator)
        if (ledger := namespace.directory.ledger) is not None:
            ledger.write_salt(namespace.salt)
        return done, slots, lack

    def make_room(self) -> None:
        """Where no more may be open, close the oldest that may go.

        Every model keeps what it holds of its floor.
        """
        if len(self._open) < self.settings.max_namespaces:
            return
        for namespace in self.closable():
            space = namespace.table.space
            group = self.pool.quotas.of(space)
            if group is None or not space.held or group.held - space.held >= group.floor:
                self.close(namespace)
                return

    def closable(self) -> list[Namespace]:
        """Namespaces without engines, with nothing pinned or being written, the oldest first."""
        return [ns for ns in self if not ns.engines and ns.table.slots.is_idle]

    def close(self, namespace: Namespace) -> None:
        """Drop a namespace that is `closable` with its chunks, and release its memory."""
        namespace.table.reset()
        self.closed_counts.add(namespace.table.counts)
        self.pool.leave(namespace.table.space)
        namespace.directory.release()
        del self._open[namespace.id]
        self._drop_buffers(namespace.id.hex())

    def check_integrity(self) -> None:
        """Raise IntegrityError where a table or the division of the pool is wrong."""
        for namespace in self:
            namespace.table.check_integrity()
        self.pool.check_integrity()

    def __repr__(self) -> str:
        return f"<Namespaces {len(self._open)}, {self.pool!r}>"
