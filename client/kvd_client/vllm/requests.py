"""The chunks of each request, reported to the daemon when the request has ended.

The daemon learns from whole requests: all chunks that a request's tokens fill, head first, how many
of them are its prompt's, and its label. So a report has also chunks that got no slot, that others
were storing, and those before the last one that vLLM's own cache had: the daemon ignores what it
does not hold. Requests are reported one by one, in the order in which they ended.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from kvd_client import Label, Scheduler
from kvd_client.vllm.ranges import BlockRanges
from kvd_proto.messages import MAX_KEYS


@dataclass(slots=True)
class EndedRequest:
    """A request that has ended.

    Attributes:
        keys: of its chunks, its head first, groups side by side.
        prompt: how many of them are its prompt's.
        label: when its chunks are expected to be used again.
    """

    keys: list[OffloadKey]
    prompt: int
    label: Label


class RequestReports:
    """What one engine's requests have offered and loaded, until it is reported.

    Args:
        scheduler: the session with the daemon.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._keys: dict[str, dict[OffloadKey, None]] = {}  # by request, offered or loaded
        self._unsettled: dict[str, EndedRequest] = {}  # some chunks may still get slots
        self._ended: list[EndedRequest] = []

    def add(self, req_id: str, keys: Iterable[OffloadKey]) -> None:
        """The request has offered or loads these chunks."""
        self._keys.setdefault(req_id, {}).update(dict.fromkeys(keys))

    def end(self, request: ReqContext, ranges: BlockRanges, *, settled: bool) -> None:
        """The request has ended; called again when its refused chunks were offered again.

        Args:
            request: of vLLM.
            ranges: knows vLLM's state of the request.
            settled: no chunk of it waits for a slot. Otherwise it is reported once that is so: a
                chunk is counted as used only while the daemon holds it.
        """
        req_id = request.req_id
        offered = self._keys.pop(req_id, None)
        if req_id not in self._unsettled:
            if not offered:
                return
            self._unsettled[req_id] = _ended_request(request, offered, ranges)
        if settled:
            self.settle(req_id)

    def settle(self, req_id: str) -> None:
        """No chunk of this request waits for a slot any more; it may still run."""
        ended = self._unsettled.pop(req_id, None)
        if ended is not None:
            self._ended.append(ended)

    def send(self) -> None:
        """Report the requests that have ended."""
        for ended in self._ended:
            keys = ended.keys[:MAX_KEYS]
            prompt = min(ended.prompt, len(keys))
            self._scheduler.request_finished(keys, prompt=prompt, label=ended.label)
        self._ended.clear()

    def clear(self) -> None:
        """Forget everything: no chunk is held any more."""
        self._keys.clear()
        self._unsettled.clear()
        self._ended.clear()

    def __repr__(self) -> str:
        return f"<RequestReports {len(self._keys)} running, {len(self._unsettled)} unsettled>"


def _ended_request(
    request: ReqContext, offered: dict[OffloadKey, None], ranges: BlockRanges
) -> EndedRequest:
    """Put the chunks of a request in order, with those before them of full attention."""

    def end_token(key: OffloadKey) -> int:
        return request.get_offload_key_position(key) or 0

    last = max(map(end_token, offered))
    before = ranges.full_attention_keys(request.req_id, last)
    keys = sorted(dict.fromkeys((*before, *offered)), key=end_token)
    tokens = ranges.prompt_tokens(request.req_id)
    prompt = len(keys) if tokens is None else sum(end_token(key) <= tokens for key in keys)
    return EndedRequest(keys, prompt, request.get_state(Label) or Label.NONE)
