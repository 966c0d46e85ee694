"""The namespaces of the daemon, which share one pool.

A namespace outlives its engines, so that the next engine of the same model finds its chunks. It is
closed by the operator, or when another one is opened and `max_namespaces` are open. A temporary
namespace, such as a self-test's, is closed after its last engine; see `Namespaces.open`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvd.cache.chunks import ChunkTable
from kvd.cache.directory import ChunkRefs, DirectoryWriter
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
    """How ledgers are made, which keep chunks for the next daemon.

    make_buffer: makes zero-filled memory that outlives the daemon, given the namespace's id in hex
        and a size.
    pool: name of the pool; a ledger of another pool is not read.
    trailer: of the pool, with the number of each ledger's last change.
    generation_base: greater than every generation of earlier daemons.
    """

    make_buffer: MakeBuffer
    pool: str
    trailer: PoolTrailer
    generation_base: int


def _describe(geometry: Geometry) -> str:
    replicated = ", all holding the same bytes" if geometry.replicated else ""
    blocks = geometry.blocks_per_chunk
    return (
        f"slots of {geometry.slot_bytes} bytes and {blocks} blocks for"
        f" {geometry.world_size} ranks{replicated}"
    )


def _sum(sizes: Iterable[int | None]) -> int | None:
    """Return the sum, or None if a size is not known."""
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total


@dataclass(slots=True, eq=False)
class Namespace:
    """A set of chunks that engines of one model and layout share.

    id: 16 bytes.
    model: the model's name; quotas, miss reasons and reports use it.
    temporary: see `Namespaces.open`.
    engines: number of attached engines.
    tokens_per_chunk: None: not known, or groups differ.
    reuse_threshold: a key gets a slot at its n-th offer.
    salt: of its last reset, from the reset file; empty: never reset, or temporary. Chunks that
        tiers keep under another salt are not used.
    """

    id: bytes
    model: str
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


class Namespaces:
    """The open namespaces.

    Args:
        cpu_bytes: the pool's size.
        settings: of the daemon: policy, quotas and limits.
        boot_id: of this daemon, 16 bytes.
        make_buffer: makes zero-filled memory for a directory, given the namespace's id in hex and a
            size in bytes; it should cost nothing until it is touched.
        make_descriptions: opens or makes the description file of a namespace; by default
            descriptions are not stored.
        drop_buffers: releases all buffers made for a namespace, given its id in hex.
        ledger_setup: how to make ledgers; None: no chunks are kept for the next daemon.
        fill: the order in which the pool's memory is filled; None: the default.
        resets: the namespaces that were reset, by this daemon and earlier ones.
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
        self.closed_counts = ChunkCounts()  # of closed namespaces, since totals never fall

    def apply_settings(self, settings: Settings) -> None:
        """Replace the settings; a new eviction policy affects namespaces opened from now on."""
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
        model: str = "",
        temporary: bool = False,
        description_record_bytes: int = 0,
    ) -> Namespace:
        """Return the namespace of this id; makes it if it is not open.

        Args:
            ns_id: 16 bytes.
            slot_bytes: bytes of one slot for each rank; one item if replicated.
            world_size: number of ranks that hold shares of a chunk.
            replicated: every rank holds the same bytes.
            blocks_per_chunk: blocks of a whole chunk.
            model: the model's name, from the fingerprint; quotas and miss reasons use it.
            temporary: closed after its last engine. It has no ledger, descriptions, tiers,
                miss-ratio curve, quota or fair share of the pool, and claims the pool in columns of
                one extent instead of `COLUMN_EXTENTS`.
            description_record_bytes: size of one description record (`kvd_proto.descriptions`); 0:
                none are stored.

        Raises:
            Refusal: BAD_LAYOUT: the sizes contradict each other, the open namespace or the pool's
                size; LIMIT: too many namespaces are open.
            KvdError: as `make_buffer` raised it; the namespace's buffers are dropped first.
        """
        geometry = Geometry(
            tuple(slot_bytes),
            self.pool.extents,
            world_size,
            replicated,
            column_width=1 if temporary else COLUMN_EXTENTS,
            blocks_per_chunk=blocks_per_chunk,
        )
        namespace = self._open.get(ns_id)
        if namespace is not None:
            if namespace.geometry != geometry:
                raise Refusal(
                    ErrorCode.BAD_LAYOUT,
                    f"namespace {ns_id.hex()} is open with {_describe(namespace.geometry)},"
                    f" asked for with {_describe(geometry)}",
                )
        else:
            self._check_can_open(geometry)
            try:
                ledger = None if temporary else self._new_ledger(ns_id, model, geometry)
                namespace = self._add(ns_id, model, geometry, ledger, temporary=temporary)
            except KvdError:
                self._drop_buffers(ns_id.hex())
                raise
        descriptions = namespace.table.descriptions
        if descriptions.writer is None and description_record_bytes and not temporary:
            descriptions.writer = self._make_descriptions(ns_id.hex(), description_record_bytes)
        return namespace

    def _new_ledger(self, ns_id: bytes, model: str, geometry: Geometry) -> Ledger | None:
        """Create the ledger of a new namespace; None if no ledgers are written."""
        if self._ledger_setup is None:
            return None
        description = LedgerDescription(
            namespace=ns_id.hex(),
            label=model,
            pool=self._ledger_setup.pool,
            cpu_bytes=self.cpu_bytes,
            slot_bytes=geometry.slot_bytes,
            world_size=geometry.world_size,
            replicated=geometry.replicated,
            blocks_per_chunk=geometry.blocks_per_chunk,
        )
        buffer = self._ledger_setup.make_buffer(ns_id.hex(), ledger_bytes(geometry.num_slots))
        salt = self.resets.salt_of(ns_id.hex())
        return Ledger.create(
            buffer, geometry.num_slots, description, self._ledger_setup.trailer, salt
        )

    def is_outdated(self, ledger: Ledger) -> bool:
        """Whether the ledger's namespace may have been reset while another pool was in use."""
        return ledger.salt != self.resets.salt_of(ledger.description.namespace)

    def reopen(self, ledger: Ledger) -> Namespace:
        """Open a namespace of the previous daemon with all chunks of its ledger.

        After an error this object must not be used any more.

        Raises:
            LedgerDamaged: the ledger is invalid.
            IntegrityError: another namespace owns some of its chunks' bytes.
        """
        description = ledger.description
        pool_name = self._ledger_setup.pool if self._ledger_setup else ""
        geometry = Geometry(
            description.slot_bytes,
            self.pool.extents,
            description.world_size,
            description.replicated,
            blocks_per_chunk=description.blocks_per_chunk,
        )
        if (description.pool, description.cpu_bytes) != (pool_name, self.cpu_bytes):
            raise LedgerDamaged(f"it belongs to another pool, of {description.cpu_bytes} bytes")
        try:
            ns_id = bytes.fromhex(description.namespace)
            self._check_can_open(geometry)
        except (ValueError, ZeroDivisionError, Refusal) as error:
            raise LedgerDamaged(f"its description is invalid: {error}") from error
        if len(ns_id) != 16 or ns_id in self._open or geometry.num_slots != ledger.num_slots:
            raise LedgerDamaged(f"its description is invalid: {description}")
        namespace = self._add(ns_id, description.label, geometry, ledger)
        namespace.table.restore(ledger.chunks())
        ledger.renumber()
        return namespace

    def _add(
        self,
        ns_id: bytes,
        model: str,
        geometry: Geometry,
        ledger: Ledger | None,
        *,
        temporary: bool = False,
    ) -> Namespace:
        """Create a namespace's directory and chunk table, and add it to the open ones."""
        # A temporary namespace is closed after its last engine: no later one would find its chunks.
        num_tiers = 0 if temporary else self._num_tiers
        tier_bytes = self._tier_bytes
        tier_chunks = None if tier_bytes is None else tier_bytes // geometry.bytes_per_chunk
        header = DirectoryHeader.plan(
            geometry.num_slots,
            ns_id,
            self._boot_id,
            geometry.blocks_per_chunk,
            change_capacity(self.settings.change_ring),
            tier_capacity=tier_table_capacity(tier_chunks) if num_tiers else 0,
            num_tiers=num_tiers,
        )
        buffer = self._make_buffer(ns_id.hex(), header.total_bytes)
        generation_base = self._ledger_setup.generation_base if self._ledger_setup else 0
        directory = DirectoryWriter(buffer, header, ledger, generation_base)
        table = ChunkTable(
            directory,
            geometry,
            self.pool,
            self.settings.policy,
            "" if temporary else model,  # whose quota its slots count against
            elsewhere=lambda key: self._is_in_other_namespace(ns_id, model, key),
            forecasts=not temporary,
        )
        namespace = self._open[ns_id] = Namespace(
            ns_id,
            model,
            table,
            temporary,
            reuse_threshold=self.settings.reuse_threshold,
            salt=b"" if temporary else self.resets.salt_of(ns_id.hex()),
        )
        return namespace

    def _is_in_other_namespace(self, ns_id: bytes, model: str, key: bytes) -> bool:
        """Whether another namespace of the same model has the key."""
        return any(
            other.model == model and other.id != ns_id and other.directory.find(key) >= 0
            for other in self._open.values()
        )

    @property
    def cpu_bytes(self) -> int:
        """The pool's size."""
        return self.pool.cpu_bytes

    def _check_can_open(self, geometry: Geometry) -> None:
        """Refuse a geometry without chunks or with too many, or one namespace too many."""
        sizes, num_arenas = geometry.slot_bytes, 1 if geometry.replicated else geometry.world_size
        if len(sizes) != num_arenas or min(sizes, default=0) < 1:
            raise Refusal(
                ErrorCode.BAD_LAYOUT,
                f"{_describe(geometry)}: {num_arenas} sizes above zero are needed",
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
        """Count an engine that uses the namespace, which then has a fair share of the pool."""
        namespace.engines += 1
        namespace.table.space.active = not namespace.temporary

    def detach_engine(self, namespace: Namespace) -> None:
        """Count an engine that left; after the last one chunks stay until others need the pool."""
        namespace.engines -= 1
        namespace.table.space.active = namespace.engines > 0 and not namespace.temporary

    def get(self, ns_id: bytes) -> Namespace | None:
        """Return the open namespace of this id, or None."""
        return self._open.get(ns_id)

    def __iter__(self) -> Iterator[Namespace]:
        return iter(list(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)

    def reset(
        self, namespace: Namespace, *, by_operator: bool = False
    ) -> tuple[ResetDone, ChunkRefs, str]:
        """Drop every chunk of a namespace, for the next daemon, too.

        1. The reset file gets a new salt.
        2. The table drops its chunks, in the ledger as well.
        3. The ledger gets the new salt.

        After a kill in between, the next daemon does not take over the ledger, whose salt is old.

        Returns:
            As `ChunkTable.reset`, and why the next daemon may find chunks in tiers again, in words;
            empty: it will not.
        """
        warning = ""
        if not namespace.temporary:  # tiers have no chunks of temporary namespaces
            warning = self.resets.draw(namespace.id.hex())
            namespace.salt = self.resets.salt_of(namespace.id.hex())
        reply, to_revoke = namespace.table.reset(by_operator=by_operator)
        if (ledger := namespace.directory.ledger) is not None:
            ledger.write_salt(namespace.salt)
        return reply, to_revoke, warning

    def make_room(self) -> None:
        """If `max_namespaces` are open, close the oldest `closable` one, if any.

        A namespace whose model would fall below its floor without it is not closed.
        """
        if len(self._open) < self.settings.max_namespaces:
            return
        for namespace in self.closable():
            space = namespace.table.space
            group = self.pool.quotas.of(space)
            owned = space.num_extents
            if group is None or not owned or group.num_extents - owned >= group.floor:
                self.close(namespace)
                return

    def closable(self) -> list[Namespace]:
        """Return the namespaces without engines and busy slots, the oldest first."""
        return [ns for ns in self if not ns.engines and ns.table.slots.is_idle]

    def close(self, namespace: Namespace) -> None:
        """Drop a `closable` namespace with its chunks, and release its memory."""
        namespace.table.reset()
        self.closed_counts.add(namespace.table.counts)
        self.pool.leave(namespace.table.space)
        namespace.directory.release()
        del self._open[namespace.id]
        self._drop_buffers(namespace.id.hex())

    def check_integrity(self) -> None:
        """Raise IntegrityError if a table or the division of the pool is inconsistent."""
        for namespace in self:
            namespace.table.check_integrity()
        self.pool.check_integrity()
