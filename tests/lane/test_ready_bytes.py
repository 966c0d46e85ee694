"""Workers that send any job in any order against a chunk table and a lane's runner.

Messages between broker and lane arrive late. The only model: bytes of a READY chunk do not change.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from kvd.cache.directory import ChunkRefs
from kvd.cache.namespaces import Namespace, Namespaces
from kvd.config.settings import Settings
from kvd.lane.device import CompletedTransfer, Direction
from kvd.lane.host_device import HostDevice
from kvd.lane.orders import OrderHandler, RequestHandler
from kvd.lane.reports import Reporter
from kvd.lane.runner import Runner
from kvd.lane.workers import LaneWorker, WorkerTable
from kvd.wire.link import LINK, BindWorker, Revoke, Revoked, ShareDone, UnbindWorker
from kvd_proto.codec import WIRE
from kvd_proto.directory import SlotState
from kvd_proto.jobs import IntArray, JobBlocks
from kvd_proto.messages import HOST, Cancel, Message, Store, Wait
from tests.cache.tables import add
from tests.lane.support import FakeWorker, Memory, bind_message, import_message
from tests.layouts import flat_layout

PAGE, BLOCKS = 4096, 2
NULL_BLOCK = 7
LAYOUTS = [
    flat_layout(*[PAGE] * pages, blocks=8, factor=BLOCKS, null_block=NULL_BLOCK) for pages in (2, 1)
]
POOL_BYTES = 4 * LAYOUTS[0].slot_bytes
ENGINES = {1: 0, 2: 0, 3: 1}  # by owner: the number of its namespace
WORKERS = {1: 1, 2: 2, 3: 3, 4: 1}  # by session: the owner; engine 1 has two sessions
DROPS = ["reset", "reset", "expire", "detach"]
KEYS = [b"key %d" % i for i in range(4)]


class ReorderingDevice(HostDevice):
    """Moves a page at a time; the test says which of up to four transfers is next."""

    piece_bytes = bulk_bytes = dict.fromkeys(Direction, PAGE)

    def __init__(self, pool: Memory) -> None:
        super().__init__(pool.fd, len(pool.bytes))
        self.turn: int | None = None

    def has_room(self, direction: Direction) -> bool:  # noqa: ARG002  # for both in common
        """Whether fewer than four are in flight."""
        return self.in_flight < 4

    def progress(self) -> list[CompletedTransfer]:
        """Copy the transfer whose turn it is."""
        if self.turn is None or self.turn >= self.in_flight:
            return []
        self._queue.rotate(-self.turn)
        completed = super().progress()
        self._queue.rotate(self.turn)
        return completed


class ReadyBytesMachine(RuleBasedStateMachine):
    """Chunk tables, runner, orders, requests and reports are the daemon's own."""

    @initialize()
    def make(self) -> None:
        """Two namespaces that share a pool, three engines, one of them with two sessions."""
        self.memories: list[Memory] = []
        self.now = 0.0
        pool = Namespaces(
            POOL_BYTES,
            Settings(policy="lru"),
            boot_id=bytes(16),
            make_buffer=self._shared_buffer,
            make_descriptions=lambda _name, _record_bytes: None,
        )
        self.spaces = [
            add(pool, number, layout.slot_bytes, blocks_per_chunk=BLOCKS)
            for number, layout in enumerate(LAYOUTS)
        ]
        self.pool = Memory(POOL_BYTES)
        self.device = ReorderingDevice(self.pool)
        self.runner = Runner(self.device)
        self.workers = WorkerTable(self.device)
        self.reports: deque[Message] = deque()  # lane to broker, not read yet
        self.orders: deque[Callable[[], None]] = deque()  # broker to lane, not read yet
        link: Any = SimpleNamespace(send=lambda frame: self.reports.append(LINK.decode(frame)[1]))
        server: Any = SimpleNamespace(limits={}, send=lambda *_: True)
        self.reporter = Reporter(server, link, self.runner)
        self.handler = OrderHandler(self.reporter, self.workers, self.device, POOL_BYTES)
        self.requests = RequestHandler(self.reporter, self.workers)
        self.sources = {session: self._connect(session) for session in WORKERS}
        self.given: dict[int, deque[tuple[int, int]]] = {o: deque(maxlen=6) for o in ENGINES}
        self.jobs = 0
        self.ready: dict[tuple[int, int], tuple[int, bytes]] = {}
        for owner in ENGINES:
            self.step(owner, {KEYS[owner]})

    def _shared_buffer(self, _: str, size: int) -> memoryview:
        self.memories.append(Memory(size))
        return self.memories[-1].bytes.data

    def _connect(self, session: int) -> FakeWorker:
        source = FakeWorker(LAYOUTS[ENGINES[WORKERS[session]]], session=session)
        worker = self.workers.import_worker(
            import_message(source.layout, session=session), source.fds
        )
        worker.client = SimpleNamespace(owner=worker, peer=None)  # type: ignore[assignment]
        self._bind(session)
        return source

    def _bind(self, session: int) -> None:
        number = ENGINES[WORKERS[session]]
        space = self.spaces[number]
        order: BindWorker = replace(
            bind_message(session, space.geometry.num_slots, owner=WORKERS[session]),
            namespace=space.id,
        )
        self.handler.execute(order, (self.memories[number].fd,))

    def _worker(self, session: int) -> LaneWorker:
        worker = self.workers.by_session(session)
        assert worker is not None
        return worker

    def _request(self, session: int, message: Message) -> None:
        self.requests.serve((self._worker(session).client, WIRE.encode(message, 1), ()))  # type: ignore[arg-type]

    def _revoke(self, space: Namespace, refs: ChunkRefs) -> None:
        """Give up DRAINING slots, as the broker does."""
        space.table.slots.wait_for([HOST], refs)
        slots, generations = ([ref[i] for ref in refs] for i in range(2))
        order = Revoke(
            namespace=space.id,
            slots=IntArray.of(slots, "u4"),
            generations=IntArray.of(generations, "u8"),
        )
        if refs:
            self.orders.append(partial(self.handler.execute, order))

    # -------------------------------------------------------------- workers

    @rule(owner=st.sampled_from(list(ENGINES)), keys=st.sets(st.sampled_from(KEYS), min_size=1))
    def step(self, owner: int, keys: set[bytes]) -> None:
        """A scheduler gets slots for keys; its workers know them from then on."""
        table = self.spaces[ENGINES[owner]].table
        slots, generations = table.lending.lend(owner, len(keys), 1, self.now)
        table.stores.begin(sorted(keys)[: len(slots)], slots, generations, owner, self.now)
        self.given[owner].extend(zip(slots, generations, strict=True))

    @rule(
        session=st.sampled_from(list(WORKERS)),
        owner=st.sampled_from([*[None] * 9, *ENGINES]),
        chosen=st.sets(st.integers(0, 5), min_size=1, max_size=3),
        stores=st.lists(
            st.tuples(st.integers(1, BLOCKS), st.integers(0, 4)), min_size=1, max_size=2
        ),
    )
    def store(
        self, session: int, owner: int | None, chosen: set[int], stores: list[tuple[int, int]]
    ) -> None:
        """A worker stores chunks of its engine, or of another; perhaps twice, with other bytes.

        The lane copies some pages after each store.
        """
        given = self.given[owner or WORKERS[session]]
        chunks = dict(given[-i] for i in chosen if 0 < i <= len(given))
        for num_blocks, pages in stores:
            self.jobs += 1
            self.sources[session].storages[0].bytes[:] = self.jobs % 251
            block_ids = [
                2 * chunk + block if block < num_blocks else NULL_BLOCK
                for chunk in range(len(chunks))
                for block in range(BLOCKS)
            ]
            slots, generations = list(chunks), list(chunks.values())
            job = JobBlocks.of(block_ids, [len(block_ids)], [0], slots, generations)
            self._request(session, Store(job=self.jobs, blocks=job, after=0, deadline_ms=60_000))
            self.run_lane(0, pages, 0, 0)

    @rule(session=st.sampled_from(list(WORKERS)), back=st.integers(0, 4), cancel=st.booleans())
    def hurry_or_cancel(self, session: int, back: int, cancel: bool) -> None:
        """A worker waits for one of the last jobs, or cancels it."""
        self._request(session, (Cancel if cancel else Wait)(jobs=(max(0, self.jobs - back),)))

    # ------------------------------------------------------------- messages

    @rule(
        turn=st.integers(0, 3),
        pages=st.integers(0, 8),
        orders=st.integers(0, 3),
        reports=st.integers(0, 3),
    )
    def run_lane(self, turn: int, pages: int, orders: int, reports: int) -> None:
        """The lane copies pages of any transfer in flight; some messages arrive."""
        for _ in range(pages):
            self.device.turn = turn
            self.runner.run_once()
            turn = min(turn, max(0, self.device.in_flight - 1))
        self.device.turn = None
        self.reporter.report_ended()
        self.reporter.send_shares()
        for _ in range(min(orders, len(self.orders))):
            self.orders.popleft()()
            self.reporter.report_ended()
        for _ in range(min(reports, len(self.reports))):
            self._read_report()

    def _read_report(self) -> None:
        message = self.reports.popleft()
        if isinstance(message, ShareDone):
            space = next(space for space in self.spaces if space.id == message.namespace)
            columns = (message.slots, message.generations, message.first, message.count)
            arrays = [column.tolist() for column in (*columns, message.groups)]
            owner = WORKERS[message.session]
            _, given_up = space.table.stores.share_done(owner, 0, *arrays, ok=message.ok)
            self._revoke(space, given_up)
        elif isinstance(message, Revoked):
            space = next(space for space in self.spaces if space.id == message.namespace)
            slots, generations = message.slots.tolist(), message.generations.tolist()
            space.table.slots.writes_ended(HOST, slots, generations)

    # --------------------------------------------------------------- broker

    @rule(owner=st.sampled_from(list(ENGINES)), how=st.sampled_from(DROPS))
    def drop(self, owner: int, how: str) -> None:
        """A namespace drops its chunks, its stores are late, or an engine leaves and returns."""
        space = self.spaces[ENGINES[owner]]
        if how == "reset":
            self._revoke(space, space.table.reset()[1])
            space.table.sweep()
        elif how == "expire":
            self.now += 61
            self._revoke(space, space.table.expire(self.now))
        else:
            self._revoke(space, space.table.drop_owner(owner))
            for session in (s for s, its_owner in WORKERS.items() if its_owner == owner):
                unbind = UnbindWorker(session=session)
                self.orders.append(partial(self.handler.execute, unbind))
                self.orders.append(partial(self._bind, session))

    @invariant()
    def bytes_of_a_ready_chunk_do_not_change(self) -> None:
        """They are those of its first moment, until the slot holds something else."""
        self.runner.check_integrity()
        for number, space in enumerate(self.spaces):
            space.table.check_integrity()
            directory = space.directory
            for slot in directory.slots_in(SlotState.READY, 0, directory.num_slots):
                ((begin, end),) = space.geometry.shares(slot)
                present = directory.generation(slot), self.pool.bytes[begin:end].tobytes()
                if self.ready.get((number, slot), (0, b""))[0] != present[0]:
                    self.ready[number, slot] = present
                assert self.ready[number, slot] == present, f"slot {slot} of namespace {number}"

    def teardown(self) -> None:
        """Every job ends, every slot is given back."""
        if not hasattr(self, "ready"):
            return
        try:
            for _ in range(100):
                self.run_lane(0, 4, len(self.orders), len(self.reports))
                self.bytes_of_a_ready_chunk_do_not_change()
            assert not len(self.runner)
            assert not any(space.table.slots.stats()["draining"] for space in self.spaces)
        finally:
            for memory in (*self.memories, self.pool):
                memory.close()
            for source in self.sources.values():
                source.close()


TestReadyBytes = ReadyBytesMachine.TestCase
TestReadyBytes.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
