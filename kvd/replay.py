"""Replay a trace of requests through eviction policies: what each request finds in a pool.

A request finds the chunks of its prompt up to the first that is missing. Then all its chunks are in
the pool, as far as they fit; each has been used once, the head of the prompt last, so that the head
stays longest.

`read_trace` reads three forms, recognized by a file's name and its first line that is not blank:

- Mooncake's: one JSON line per request, with `timestamp` (ms), `input_length` (tokens) and
  `hash_ids`, one id for each `tokens_per_id` tokens, the last one for the rest.
- LMCache's: one JSON line per request, with `timestamp` (µs) and the prompt's text as `input`.
- kv-cache-tester's: a file NAME.json per conversation, with `block_size` and `requests`, each with
  `t` (s) and `hash_ids`; requests of a sub-agent are nested, with times relative to its start.

A folder holds one conversation per file. The files give the times within a conversation, but not
how conversations overlapped: `users` of them run at a time, in the order of the files' names, and
each user begins the next one when the last one has ended.
"""

import heapq
import math
from collections.abc import Hashable, Iterator, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvd.cache.eviction import EvictionPolicy
from kvd.cache.ghosts import Ghosts
from kvd.errors import TraceError
from kvd_proto.messages import Label, label_for

TOKENS_PER_ID = 512
USERS = 20
GHOSTS_PER_SLOT = 2.0
NEVER = math.inf
_PIECE_CHARACTERS, _PIECE_TOKENS = 256, 64  # of a prompt's text: four characters per token
_LINE_FORMS = 'a line is {"timestamp": ms, "input_length": tokens, "hash_ids": [...]}'

Chunks = npt.NDArray[np.int32]
Hits = npt.NDArray[np.int64]
"""Chunks found, by request."""
_Time = Annotated[float, msgspec.Meta(ge=0)]
_Tokens = Annotated[int, msgspec.Meta(ge=0)]


class TracedRequest(NamedTuple):
    """A request: its time (s), its number of prompt tokens, and its chunks' numbers in order."""

    time: float
    tokens: int
    chunks: Chunks


class Trace(NamedTuple):
    """Requests in the order of time; their chunks are numbered 0..num_chunks - 1.

    Chunks have the same number if they and all chunks before them are equal.
    """

    requests: list[TracedRequest]
    num_chunks: int
    tokens_per_chunk: int

    @property
    def tokens(self) -> int:
        """The number of tokens of all prompts."""
        return sum(request.tokens for request in self.requests)


class _IdsLine(msgspec.Struct):
    timestamp: _Time
    input_length: _Tokens
    hash_ids: list[int]


class _TextLine(msgspec.Struct):
    timestamp: _Time
    input: str


class _ConversationRequest(msgspec.Struct):
    """A request of a conversation, or a sub-agent with `requests` of its own."""

    t: _Time
    tokens: _Tokens = msgspec.field(default=0, name="in")
    hash_ids: list[int] = []
    requests: list["_ConversationRequest"] | None = None


class _ConversationFile(msgspec.Struct):
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    requests: list[_ConversationRequest]
    hash_id_scope: str = "local"


_Json = TypeVar("_Json", _IdsLine, _TextLine, _ConversationFile)


def read_trace(
    path: Path,
    *,
    tokens_per_id: int = TOKENS_PER_ID,
    ids_per_chunk: int = 1,
    users: int = USERS,
) -> Trace:
    """Read a trace: a file, or a folder with one conversation per file.

    Args:
        path: the file or folder.
        tokens_per_id: for Mooncake's form, which does not state it.
        ids_per_chunk: ids that make a chunk; above 1 the rest of a prompt is no chunk, as in a
            pool.
        users: for a folder, the number of conversations at a time.

    Raises:
        TraceError: names the file, the line, what is wrong there, and the remedy.
    """
    reader = _TraceReader(tokens_per_id, ids_per_chunk)
    try:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*.json*") if file.stat().st_size)
            if not files:
                raise TraceError(f"{path}: no *.json or *.jsonl in it; name a folder with a trace")
            requests = _overlapped((reader.read(file) for file in files), users)
        else:
            requests = reader.read(path)
    except OSError as error:
        raise TraceError(f"{error.filename or path}: cannot be read ({error.strerror})") from error
    if not requests:
        raise TraceError(f"{path}: holds no request; {_LINE_FORMS}")
    requests.sort(key=lambda request: request.time)
    return Trace(requests, len(reader.numbers), reader.tokens_per_id * ids_per_chunk)


class _TraceReader:
    """Reads files of one trace, and numbers its chunks."""

    def __init__(self, tokens_per_id: int, ids_per_chunk: int) -> None:
        self.tokens_per_id = tokens_per_id  # replaced if a file states it
        self.numbers: dict[tuple[int, Hashable], int] = {}  # by parent chunk and own ids
        self._ids_per_chunk = ids_per_chunk
        self._roots = count(-2, -1)  # parents of conversations' first chunks
        self._form: str | None = None

    def read(self, path: Path) -> list[TracedRequest]:
        """Return the requests of a file, in its order."""
        if path.suffix == ".json":
            return self._conversation(path)
        return list(self._lines(path))

    def _lines(self, path: Path) -> Iterator[TracedRequest]:
        is_text: bool | None = None  # the file's first line that is not blank decides
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                location = f"{path}:{number}"
                if is_text is None:
                    is_text = b'"hash_ids"' not in line and b'"input"' in line
                    self._set_form(path, "text" if is_text else "ids")
                yield self._text_line(location, line) if is_text else self._ids_line(location, line)

    def _set_form(self, path: Path, form: str, tokens_per_id: int | None = None) -> None:
        """Set the form and the tokens of an id, or refuse a file that differs from earlier ones."""
        tokens = {"text": _PIECE_TOKENS}.get(form, tokens_per_id or self.tokens_per_id)
        if self._form is None:
            self._form, self.tokens_per_id = form, tokens
        elif (form, tokens) != (self._form, self.tokens_per_id):
            raise TraceError(
                f"{path}: {form} of {tokens} tokens, the files before it have {self._form} of"
                f" {self.tokens_per_id}; keep them in folders of their own"
            )

    def _ids_line(self, location: str, line: bytes) -> TracedRequest:
        request = _decode(location, line, _IdsLine)
        tokens, ids, size = request.input_length, request.hash_ids, self.tokens_per_id
        if len(ids) not in {tokens // size, math.ceil(tokens / size)}:
            guess = 2 ** max(0, round(math.log2(max(1, tokens) / max(1, len(ids)))))
            raise TraceError(
                f"{location}: {len(ids):,} hash_ids for input_length = {tokens:,}, where"
                f" --tokens-per-id {size} needs {math.ceil(tokens / size):,}; {guess} would fit"
            )
        return TracedRequest(request.timestamp / 1e3, tokens, self._chain(ids, -1))

    def _text_line(self, location: str, line: bytes) -> TracedRequest:
        request = _decode(location, line, _TextLine)
        text, size = request.input, _PIECE_CHARACTERS
        pieces = [text[at : at + size] for at in range(0, len(text) - size + 1, size)]
        tokens = math.ceil(len(text) * _PIECE_TOKENS / size)
        return TracedRequest(request.timestamp / 1e6, tokens, self._chain(pieces, -1))

    def _conversation(self, path: Path) -> list[TracedRequest]:
        conversation = _decode(str(path), path.read_bytes(), _ConversationFile)
        self._set_form(path, "blocks", conversation.block_size)
        root = -1 if conversation.hash_id_scope == "global" else next(self._roots)
        return sorted(self._entries(conversation.requests, 0.0, root), key=lambda r: r.time)

    def _entries(
        self, entries: list[_ConversationRequest], start: float, root: int
    ) -> Iterator[TracedRequest]:
        for entry in entries:
            time = start + entry.t
            if entry.requests is not None:
                yield from self._entries(entry.requests, time, root)
            else:
                yield TracedRequest(time, entry.tokens, self._chain(entry.hash_ids, root))

    def _chain(self, ids: Sequence[Hashable], parent: int) -> Chunks:
        """Return the numbers of a prompt's chunks; new chunks get new numbers."""
        size, numbers, chain = self._ids_per_chunk, self.numbers, []
        chunks: Iterator[Hashable] = (
            iter(ids)
            if size == 1
            else (tuple(ids[at : at + size]) for at in range(0, len(ids) - size + 1, size))
        )
        for ids_of_chunk in chunks:
            parent = numbers.setdefault((parent, ids_of_chunk), len(numbers))
            chain.append(parent)
        return np.array(chain, np.int32)


def _decode(location: str, data: bytes, form: type[_Json]) -> _Json:
    try:
        return msgspec.json.decode(data, type=form)
    except msgspec.DecodeError as error:
        remedy = (
            "a conversation is a file of kv-cache-tester; name other traces *.jsonl"
            if form is _ConversationFile
            else _LINE_FORMS
        )
        raise TraceError(f"{location}: {error}; {remedy}") from error


def _overlapped(conversations: Iterator[list[TracedRequest]], users: int) -> list[TracedRequest]:
    """Return all requests, with `users` conversations at a time."""
    requests: list[TracedRequest] = []
    free_at = [0.0] * users
    for conversation in conversations:
        if not conversation:
            continue
        times = [request.time for request in conversation]
        begin = free_at[0]
        heapq.heapreplace(free_at, begin + max(times) - min(times))
        shift = begin - min(times)
        requests += [request._replace(time=request.time + shift) for request in conversation]
    return requests


# ----------------------------------------------------------------- simulation


def replay_policy(
    trace: Trace,
    policy_type: type[EvictionPolicy],
    num_slots: int,
    *,
    labels: Sequence[Label] | None = None,
    ghosts_per_slot: float = GHOSTS_PER_SLOT,
) -> Hits:
    """Replay a trace through a policy of the broker; return the chunks that each request finds.

    Args:
        trace: the requests.
        policy_type: one of `kvd.cache.eviction.POLICIES`.
        num_slots: chunks that the pool holds, at least 1.
        labels: one for each request, or None.
        ghosts_per_slot: evicted keys that the policy remembers, per slot of the pool.
    """
    keys = [number.to_bytes(8, "little") for number in range(trace.num_chunks)]
    chunk_in = np.zeros(num_slots, np.int32)
    slot_of = np.full(trace.num_chunks, -1, np.int64)
    free = list(range(min(num_slots, trace.num_chunks)))  # more are never needed
    pinned: set[int] = set()
    ghosts = Ghosts(int(ghosts_per_slot * num_slots))
    policy = policy_type(num_slots, lambda slot: keys[chunk_in[slot]], ghosts)
    hits = np.zeros(len(trace.requests), np.int64)

    def may_evict(slot: int) -> bool:
        return slot not in pinned

    for index, request in enumerate(trace.requests):
        now, chunks = request.time, request.chunks[:num_slots]
        slots = slot_of[chunks]
        missing = np.flatnonzero(slots < 0)
        hits[index] = missing[0] if len(missing) else len(slots)
        if hits[index]:
            policy.refresh_all(slots[: hits[index]][::-1].tolist(), now)
        if len(missing) > len(free):
            pinned.clear()
            pinned.update(slots[slots >= 0].tolist())
            victims = policy.reserve(len(missing) - len(free), may_evict, now)
            policy.evict(victims, now)
            slot_of[chunk_in[victims]] = -1
            free += victims
        if len(missing):
            new = [free.pop() for _ in range(len(missing))]
            slots[missing] = new
            chunk_in[new] = chunks[missing]
            slot_of[chunks[missing]] = new
            policy.insert_all(new[::-1], now)
        if len(slots):
            policy.use_all(slots[::-1].tolist(), now, labels[index] if labels else Label.NONE)
        while policy.learn():
            pass
    return hits


def next_uses(trace: Trace) -> list[npt.NDArray[np.int64]]:
    """Return for each chunk of each request the next request with it; `len(requests)` if none."""
    upcoming = np.full(trace.num_chunks, len(trace.requests), np.int64)
    uses = []
    for index in range(len(trace.requests) - 1, -1, -1):
        chunks = trace.requests[index].chunks
        uses.append(upcoming[chunks])
        upcoming[chunks] = index
    return uses[::-1]


def replay_belady(trace: Trace, num_slots: int) -> Hits:
    """Return the hits if the chunk whose next use is last is evicted first: no policy has more.

    A chunk that is never used again is not kept. The next request with a chunk also has all chunks
    before it, so a request's deepest chunks are used again last.
    """
    never = len(trace.requests)
    present = np.zeros(trace.num_chunks, bool)
    num_present = 0
    # Of a request: (-next use, -end, begin, request). Runs whose next use has passed lie below all
    # that are present, and are never popped.
    runs: list[tuple[int, int, int, int]] = []
    hits = np.zeros(never, np.int64)
    for index, (request, uses) in enumerate(zip(trace.requests, next_uses(trace), strict=True)):
        chunks = request.chunks
        was_present = present[chunks]
        hits[index] = len(was_present) if was_present.all() else int(np.argmin(was_present))
        used_again = uses < never
        num_present += int(np.count_nonzero(used_again)) - int(np.count_nonzero(was_present))
        present[chunks] = used_again
        bounds = [0, *(np.flatnonzero(np.diff(uses)) + 1).tolist(), len(uses)]
        for begin, end in pairwise(bounds):
            if begin < end and uses[begin] < never:
                heapq.heappush(runs, (-int(uses[begin]), -end, begin, index))
        while num_present > num_slots:
            negative_use, negative_end, begin, owner = heapq.heappop(runs)
            end = -negative_end
            cut = max(begin, end - (num_present - num_slots))
            present[trace.requests[owner].chunks[cut:end]] = False
            num_present -= end - cut
            if begin < cut:
                heapq.heappush(runs, (negative_use, -cut, begin, owner))
    return hits


def continuations(trace: Trace) -> list[int]:
    """Return for each request the index of the next one with its last complete chunk.

    It is `len(requests)` if there is none.
    """
    indexes = []
    for request, uses in zip(trace.requests, next_uses(trace), strict=True):
        num_complete = min(len(uses), request.tokens // trace.tokens_per_chunk)
        indexes.append(int(uses[num_complete - 1]) if num_complete else len(trace.requests))
    return indexes


def return_gaps(trace: Trace) -> list[float]:
    """Return the seconds until each request is continued, or NEVER."""
    times = [*(request.time for request in trace.requests), NEVER]
    return [times[next_index] - times[i] for i, next_index in enumerate(continuations(trace))]


def labels_for(gaps: Sequence[float]) -> list[Label]:
    """Return the labels of requests that are continued after these seconds."""
    return [Label.DONE if gap == NEVER else label_for(gap) for gap in gaps]
