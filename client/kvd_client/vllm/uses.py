"""What requests used of the cache, until the daemon is told that they have finished.

vLLM's own manager does the same: the chunks that a request loaded, stored, or found
present when it offered them are as recent as the end of the request, its head last.
"""

import logging
from collections.abc import Iterable

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx

from kvd_proto.messages import MAX_KEYS

log = logging.getLogger("kvd_client.vllm")


class Uses:
    """Keys by request, and those of requests that have finished since the last `take`."""

    def __init__(self) -> None:
        self._running: dict[str, dict[OffloadKey, None]] = {}  # ordered
        self._finished: list[list[OffloadKey]] = []

    def add(self, keys: Iterable[OffloadKey], request: ReqContext) -> None:
        """The request has loaded, stored, or offered these and they were there."""
        self._running.setdefault(request.req_id, {}).update(dict.fromkeys(keys))

    def finish(self, request: ReqContext) -> None:
        """The request has finished, or will never run."""
        keys = list(self._running.pop(request.req_id, ()))
        ends = {key: request.get_offload_key_position(key) for key in keys}
        if None not in ends.values():  # groups one beside the other, by where chunks end
            keys.sort(key=lambda key: (ends[key], get_offload_group_idx(key)))
        if keys:
            self._finished.append(keys)

    def take(self) -> list[OffloadKey]:
        """Each key once: of the request that finished last first, a prompt's head first."""
        if not self._finished:
            return []
        latest_first = reversed(self._finished)
        keys = list(dict.fromkeys(key for keys in latest_first for key in keys))
        self._finished.clear()
        if len(keys) > MAX_KEYS:
            log.debug("%d chunks used in one step, %d of them are told", len(keys), MAX_KEYS)
        return keys[:MAX_KEYS]

    def clear(self) -> None:
        """Nothing that was used is in the cache any more."""
        self._running.clear()
        self._finished.clear()

    def __repr__(self) -> str:
        return f"<Uses of {len(self._running)} requests, {len(self._finished)} finished>"
