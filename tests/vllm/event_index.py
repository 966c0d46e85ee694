"""What a router can know of one engine: its published bytes, read from its socket, and an index."""

import threading
from collections.abc import Callable, Sequence
from typing import Self

import msgspec
import zmq
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockStored,
    KVEventBatch,
)

from tests.waiting import PATIENCE

POLL_MS = 50


class EventIndex:
    """Blocks of one group that an engine has, by medium.

    Attributes:
        cleared: how often all was cleared.
    """

    def __init__(self) -> None:
        self.held: dict[str, set[object]] = {MEDIUM_GPU: set(), MEDIUM_CPU: set()}
        self.cleared = 0
        # A block's hash, by its parent's and its tokens. That is so whether or not it is held.
        self._blocks: dict[tuple[object, tuple[int, ...]], object] = {}

    def take(self, batch: KVEventBatch) -> None:
        """Take the events of one batch, in order."""
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                for held in self.held.values():
                    held.clear()
                self.cleared += 1
            elif isinstance(event, BlockStored):
                self._learn(event)
                self.held[event.medium].update(event.block_hashes)
            else:
                self.held[event.medium].difference_update(event.block_hashes)

    def _learn(self, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        if not event.token_ids:  # of a chunk that went before its description was read
            return
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert not any(event.extra_keys or ())
        for i, block in enumerate(event.block_hashes):
            self._blocks[parent, tuple(event.token_ids[i * size : (i + 1) * size])] = block
            parent = block

    def chain(self, prompt: Sequence[int], block_size: int) -> list[object]:
        """The hashes of a prompt's blocks, as far as they are known, without its last token's."""
        chain: list[object] = []
        for begin in range(0, len(prompt) - block_size, block_size):
            parent = chain[-1] if chain else None
            block = self._blocks.get((parent, tuple(prompt[begin : begin + block_size])))
            if block is None:
                break
            chain.append(block)
        return chain

    def promised(self, prompt: Sequence[int], block_size: int) -> tuple[int, int]:
        """Tokens whose KV the engine will find on the GPU, and from there on in the pool."""
        chain = self.chain(prompt, block_size)
        found = [0]
        for medium in (MEDIUM_GPU, MEDIUM_CPU):
            end = found[-1]
            while end < len(chain) and chain[end] in self.held[medium]:
                end += 1
            found.append(end)
        _, gpu, pool = found
        return gpu * block_size, (pool - gpu) * block_size


class Subscriber:
    """Reads what an engine publishes into an index, in a thread, until the context is left.

    Args:
        endpoint: that the engine binds, now or later.

    Attributes:
        index: what was read; look at it within `wait`, or when nothing is published.
    """

    def __init__(self, endpoint: str) -> None:
        self.index = EventIndex()
        self._endpoint = endpoint
        self._changed = threading.Condition()
        self._ends = threading.Event()
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="subscriber", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def wait(self, is_so: Callable[[EventIndex], object]) -> None:
        """Until the index is so."""
        with self._changed:
            so = self._changed.wait_for(lambda: self._failed or is_so(self.index), PATIENCE)
        if self._failed is not None:
            raise self._failed
        assert so, f"not so after {PATIENCE:g} s"

    def _run(self) -> None:
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        with zmq.Context() as context, context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.subscribe(b"")
            socket.connect(self._endpoint)
            expected = 0
            while not self._ends.is_set():
                if not socket.poll(POLL_MS):
                    continue
                try:
                    _, sequence, payload = socket.recv_multipart()
                    assert int.from_bytes(sequence, "big") == expected, "a batch was lost"
                    expected += 1
                    batch = decoder.decode(payload)
                    with self._changed:
                        self.index.take(batch)
                        self._changed.notify_all()
                except Exception as error:  # noqa: BLE001  # who waits raises it
                    with self._changed:
                        self._failed = error
                        self._changed.notify_all()
                    return
