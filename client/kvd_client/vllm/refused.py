"""Chunks that were offered while no slot was at hand: offered again, or given up.

vLLM offers a chunk once: what a request stores next only grows, and a request that has ended is
forgotten in the step after its end. Slots come on loan in the answer to a step's message, so where
a step needs more than there were, they come one step late. Then the chunks are offered in that
step: `next_stored_chunk_idx` of the request's groups is put back to them, and a request that has
ended is shown to vLLM once more. Where the daemon has answered and lent nothing they are given up,
so a pool that stays full costs nothing.

Blocks of a request that has ended, and those that a window has passed, may be given to others
meanwhile. What a block holds is there until the next forward pass, before which vLLM has such
stores done; chunks whose blocks were given away in an earlier step are given up.
"""

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
    """What one scheduler's requests are to be offered again.

    Args:
        manager: has noted what was refused.
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
        self._size = config.blocks_per_chunk
        self._windows = [
            group.sliding_window_size_in_chunks is not None for group in config.kv_group_configs
        ]
        self._requests = requests
        self._ended: dict[str, RequestOffloadState] = {}  # with refused chunks
        self._again: list[RequestOffloadState] = []  # ended before, and shown in this step

    def offer_again(self, output: SchedulerOutput, allocated: AbstractSet[int]) -> SchedulerOutput:
        """Let vLLM offer refused chunks in this step, of as many requests as there are loans for.

        Args:
            output: what is scheduled.
            allocated: blocks that requests were given in this step.

        Returns:
            What vLLM is to see: requests that ended earlier have ended in this step.
        """
        refused, loans = self._manager.refused, self._manager.loans()
        for req_id, chunks in list(refused.items()):
            status = self._status(req_id)
            if loans == 0 or status is None:
                self._manager.give_up(req_id)
                continue
            ended = status.req.is_finished()
            if not ended:
                self._void(req_id, status, allocated, windows_only=True)
            if req_id not in refused or loans is None or loans < 0:
                continue  # nothing is left, or it is offered in a later step
            loans = loans - len(chunks) or -1  # the last one may need more than there are
            del refused[req_id]
            for number, chunk in chunks:
                group = status.group_states[number]
                group.next_stored_chunk_idx = min(group.next_stored_chunk_idx, chunk)
            if ended and req_id not in output.finished_req_ids:
                self._again.append(status)
                self._requests[req_id] = status
        if not self._again:
            return output
        names = {status.req.request_id for status in self._again}
        return replace(output, finished_req_ids=output.finished_req_ids | names)

    def keep(self, allocated: AbstractSet[int]) -> None:
        """The step's stores are built: keep requests that have ended and were refused chunks.

        Args:
            allocated: blocks that requests were given in this step; the forward pass writes them.
        """
        for status in self._again:
            self._manager.on_request_finished(status.req_context)
            if not status.transfer_jobs:  # else vLLM forgets it with the last of them
                self._requests.pop(status.req.request_id, None)
        self._again.clear()
        ended = {}
        for req_id in list(self._manager.refused):
            status = self._status(req_id)
            if status is not None and status.req.is_finished():
                ended[req_id] = status
                self._void(req_id, status, allocated, windows_only=False)
        self._ended = ended

    def _status(self, req_id: str) -> RequestOffloadState | None:
        return self._requests.get(req_id) or self._ended.get(req_id)

    def _void(
        self,
        req_id: str,
        status: RequestOffloadState,
        allocated: AbstractSet[int],
        *,
        windows_only: bool,
    ) -> None:
        """Take out blocks that others have, of windows only or of all groups.

        A window's chunk may lack its first blocks, as at a window's edge; any other is given up.
        """
        lost = set()
        for number, chunk in self._manager.refused[req_id]:
            window = self._windows[number]
            if windows_only and not window:
                continue
            blocks, first = status.group_states[number].block_ids, chunk * self._size
            held = blocks[first : first + self._size]
            gone = max((at for at, block in enumerate(held, 1) if block in allocated), default=0)
            if gone:
                end = gone if window else self._size
                blocks[first : first + end] = [0] * end
                if end == self._size:
                    lost.add((number, chunk))
        if lost:
            self._manager.give_up(req_id, lost)
