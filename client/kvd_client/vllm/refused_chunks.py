"""Chunks that got no slot at first: they are offered again, or given up."""

from collections.abc import MutableMapping
from collections.abc import Set as AbstractSet
from dataclasses import replace

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    RequestOffloadState,
    SchedulerOffloadConfig,
)
from vllm.v1.core.sched.output import SchedulerOutput

from kvd_client.vllm.manager import KvdOffloadingManager


class RefusedChunks:
    """Lets vLLM offer refused chunks again, or gives them up.

    vLLM offers a chunk once: a request's `next_stored_chunk_idx` only grows, and an ended request
    is forgotten in the step after its end. Slots come on loan in the reply to a step's message, so
    if a step needs more than there are, they come one step late. In that step the index of the
    request's groups is set back to the refused chunks, and a request that has ended is shown to
    vLLM once more. If the daemon has replied and lent nothing, the chunks are given up, so that
    a full pool costs nothing.

    Blocks of ended requests, and blocks that a window has passed, may be allocated to other
    requests meanwhile. A block keeps its content until the next forward pass, and vLLM completes
    such stores before it. Chunks whose blocks were allocated in an earlier step are given up.

    Args:
        manager: with the refused chunks.
        config: vLLM's configuration of groups and chunks.
        requests: vLLM's state of every request, by request id.
    """

    def __init__(
        self,
        manager: KvdOffloadingManager,
        config: SchedulerOffloadConfig,
        requests: MutableMapping[str, RequestOffloadState],
    ) -> None:
        self._manager = manager
        self._blocks_per_chunk = config.blocks_per_chunk
        self._is_window = [
            group.sliding_window_size_in_chunks is not None for group in config.kv_group_configs
        ]
        self._requests = requests
        # State of ended requests that have refused chunks, by request id: vLLM forgets it.
        self._retained: dict[str, RequestOffloadState] = {}
        # Requests that ended in earlier steps, and are among this step's finished ones again.
        self._refinished: list[RequestOffloadState] = []

    def offer_again(self, output: SchedulerOutput, allocated: AbstractSet[int]) -> SchedulerOutput:
        """Let vLLM offer refused chunks in this step, of as many requests as there are loans for.

        Args:
            output: of this step.
            allocated: blocks that were allocated in this step.

        Returns:
            The output to show to vLLM: with ended requests among those that finished in this step.
        """
        refused, loans = self._manager.refused, self._manager.scheduler.loans
        for req_id, chunks in list(refused.items()):
            status = self._status(req_id)
            if loans == 0 or status is None:
                self._manager.give_up(req_id)
                continue
            ended = status.req.is_finished()
            if not ended:
                self._drop_reallocated_blocks(req_id, status, allocated, windows_only=True)
            if req_id not in refused or loans is None or loans < 0:
                continue  # nothing is left, or it is offered in a later step
            loans = loans - len(chunks) or -1  # below 0: all are planned, perhaps too few
            del refused[req_id]
            for number, chunk in chunks:
                group = status.group_states[number]
                group.next_stored_chunk_idx = min(group.next_stored_chunk_idx, chunk)
            if ended and req_id not in output.finished_req_ids:
                self._refinished.append(status)
                self._requests[req_id] = status
        if not self._refinished:
            return output
        req_ids = {status.req.request_id for status in self._refinished}
        return replace(output, finished_req_ids=output.finished_req_ids | req_ids)

    def after_store_jobs(self, allocated: AbstractSet[int]) -> None:
        """Settle the refused chunks of ended requests, once vLLM has built the step's store jobs.

        1. Finish again the ended requests that `offer_again` has shown to vLLM once more.
        2. Retain the state of ended requests that still have refused chunks: vLLM forgets it.
        3. Give up their chunks whose blocks this step has allocated to other requests.

        Args:
            allocated: blocks that were allocated in this step; the forward pass overwrites them.
        """
        for status in self._refinished:
            self._manager.on_request_finished(status.req_context)
            if not status.transfer_jobs:  # else vLLM removes it when its last transfer job ends
                self._requests.pop(status.req.request_id, None)
        self._refinished.clear()
        retained = {}
        for req_id in list(self._manager.refused):
            status = self._status(req_id)
            if status is not None and status.req.is_finished():
                retained[req_id] = status
                self._drop_reallocated_blocks(req_id, status, allocated, windows_only=False)
        self._retained = retained

    def _status(self, req_id: str) -> RequestOffloadState | None:
        return self._requests.get(req_id) or self._retained.get(req_id)

    def _drop_reallocated_blocks(
        self,
        req_id: str,
        status: RequestOffloadState,
        allocated: AbstractSet[int],
        *,
        windows_only: bool,
    ) -> None:
        """Drop blocks allocated to other requests from refused chunks, or give the chunks up.

        A window's chunk may lack its first blocks, as at the window's edge; it is given up if it
        has lost its last block. Any other chunk that has lost a block is given up.
        """
        given_up = set()
        for number, chunk in self._manager.refused[req_id]:
            is_window = self._is_window[number]
            if windows_only and not is_window:
                continue
            block_ids, first = status.group_states[number].block_ids, chunk * self._blocks_per_chunk
            chunk_ids = block_ids[first : first + self._blocks_per_chunk]
            num_lost = max(
                (end for end, block in enumerate(chunk_ids, 1) if block in allocated), default=0
            )
            if num_lost:
                num_dropped = num_lost if is_window else self._blocks_per_chunk
                block_ids[first : first + num_dropped] = [0] * num_dropped
                if num_dropped == self._blocks_per_chunk:
                    given_up.add((number, chunk))
        if given_up:
            self._manager.give_up(req_id, given_up)
