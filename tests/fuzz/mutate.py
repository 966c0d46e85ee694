"""Changes to a valid session: of single bytes, of fields by their types, of the order of things.

Each is a function of a script and a source of randomness, so that a case is a seed and a list of
(name, seed), which Hypothesis can make shorter.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from kvd_proto.codec import HEADER_BYTES, MAX_MESSAGE_BYTES
from kvd_proto.jobs import IntArray
from kvd_proto.messages import TAGS, Pin, Step
from kvd_proto.zmtp import MORE, command, frame_header
from tests.fuzz.sessions import GENERATION, SLOT, Act, Script, Where, arrays, request, session

JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, float("nan"), float("inf"), "", "text", b"", b"\0" * 16),
    *([], [[]], {}, {"more": 1}, 2**63, 2**64 - 1, -(2**63), "\0", "é\u202e" * 20),
)
NUMBERS = (
    *(0, 1, -1, 2, 63, 64, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32),
    *(600_000, 600_001, 2**47, 2**48, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1),
)
FLOATS = (0.0, -0.0, -1.0, 1e9, 1e9 + 1, 1e308, 5e-324, float("nan"), float("inf"), 3)
DTYPES = ("u1", "u2", "u4", "u8", "i4", "f4", "O", "")
LONG = (47, 48, 49, 255, 256, 257, 4096, 4097, 65536)
WORDS = ("host", "scheduler", "worker", "tool", "ipc", "vmm", "\n\x1b[31m\0", "../..", "")


def changed(rng: random.Random, value: Any) -> Any:
    """Return `value` with one thing in it that is different, as a rule near what is allowed."""
    if rng.random() < 0.1:
        return rng.choice(JUNK)
    match value:
        case dict():
            return _map(rng, value)
        case [str() as dtype, bytes() as data] if dtype in DTYPES[:4]:
            return _array(rng, dtype, data)
        case list():
            return _sequence(rng, value)
        case bool():
            return rng.choice([not value, 0, 1, None])
        case int():
            near = (value + 1, value - 1, value * 2, value // 2, -value)
            return min(max(rng.choice([*near, *NUMBERS]), -(2**63)), 2**64 - 1)
        case float():
            return rng.choice(FLOATS)
        case str():
            long = rng.choice(LONG)
            return rng.choice([*WORDS, "x" * long, "é" * long, f"{value}x"])
        case bytes():
            return rng.choice([b"", bytes(rng.choice(LONG)), rng.randbytes(16), value + b"x"])
    return rng.choice(JUNK)


def _map(rng: random.Random, value: dict[Any, Any]) -> Any:
    new = dict(value)
    choice = rng.random()
    if choice < 0.05 and new:
        del new[rng.choice(sorted(new))]
    elif choice < 0.08 or not new:
        new[rng.choice(["more", "temporary", "namespace", "lookups", "first"])] = rng.choice(JUNK)
    else:
        name = rng.choice(sorted(new))
        new[name] = changed(rng, new[name])
    return new


def _array(rng: random.Random, dtype: str, data: bytes) -> Any:
    """An IntArray: other items, more or fewer of them, another dtype, half an item."""
    choice = rng.random()
    if choice < 0.1:
        return [rng.choice(DTYPES), data]
    if choice < 0.2:
        return [dtype, data + bytes(rng.randint(1, 9))]
    items = np.frombuffer(data, "<" + dtype).tolist()
    info = np.iinfo("<" + dtype)
    if choice < 0.4:
        items = _shuffled(rng, items, items[-1] if items else 0)
    elif items:
        place = rng.randrange(len(items))
        number = rng.choice((*NUMBERS, int(info.max)))
        items[place] = rng.choice([number, items[place] + 1, items[place] - 1])
    else:
        items = [0] * rng.choice([1, 2, 1000])
    fitting = [min(max(item, int(info.min)), int(info.max)) for item in items]
    return [dtype, np.array(fitting, "<" + dtype).tobytes()]


def _sequence(rng: random.Random, value: list[Any]) -> Any:
    if rng.random() < 0.3 or not value:
        return _shuffled(rng, value, value[-1] if value else rng.choice(JUNK))
    items = list(value)
    place = rng.randrange(len(items))
    items[place] = changed(rng, items[place])
    return items


def _shuffled(rng: random.Random, items: list[Any], last: Any) -> list[Any]:
    choices: tuple[list[Any], ...] = (
        [],
        items[: rng.randint(0, len(items))],
        items + items,
        rng.sample(items, len(items)),
        [*items, last],
        items + [last] * rng.choice([10, 300, 5000]),
    )
    return rng.choice(choices)


# ------------------------------------------------------------------------ steps

KEYS = tuple(b"key-%08x" % number for number in range(3))
SLOTS = (*range(SLOT, SLOT + 8), 0, 1, 2, 3, 63, 64, 2**31 - 1, 2**31, 2**32 - 1)
GENERATIONS = (*range(GENERATION, GENERATION + 8), 0, 1, 2, 3, 2**62, 2**64 - 1)
COUNTS = (0, 1, 2, 3, 4, 255, 65535)
LEASES = (0, 1, 5, 10, 15, 2**31, 2**63 - 1)
MANY = (0, 1, 2, 7, 64, 65536, 2**31, 2**63 - 1)
OFFERS = (0, 1, 7, 2**31, 2**32 - 1)


def hostile_step(rng: random.Random) -> Step:
    """What a scheduler may not say in a step, or would better not; some of it at once."""
    parts: dict[str, Any] = {}
    for part in rng.sample(PARTS, rng.choice([1, 1, 2, 3])):
        parts |= part(rng)
    return Step(**parts)


def _begun(rng: random.Random) -> dict[str, Any]:
    """Keys, some of them twice, in slots that were lent to others, to nobody, or to two keys."""
    keys = tuple(rng.choices(KEYS, k=rng.choice([1, 2, 4])))
    count = rng.choice([len(keys), len(keys), len(keys), len(keys) + 1, 0])
    return {"keys": keys} | _slots(rng, count)


def _parts(rng: random.Random) -> dict[str, Any]:
    """Blocks that a chunk has not, or of another number of keys."""
    keys = tuple(rng.choices(KEYS, k=rng.choice([1, 2])))
    first, count = (rng.choices(COUNTS, k=rng.choice([2, len(keys)])) for _ in range(2))
    blocks = {"first": IntArray.of(first, "u2"), "count": IntArray.of(count, "u2")}
    return {"keys": keys} | _slots(rng, len(keys)) | blocks


def _pins(rng: random.Random) -> dict[str, Any]:
    """Chunks that are not READY, not there, or not of this namespace; leases by one number."""
    pins = []
    for _ in range(rng.choice([1, 2, 30])):
        lease, lease_ms = rng.choice(LEASES), rng.choice([1, 5000, 600_000])
        pins.append(Pin(lease=lease, lease_ms=lease_ms, **_slots(rng, rng.choice([0, 1, 3]))))
    return {"pins": tuple(pins)}


def _uses(rng: random.Random) -> dict[str, Any]:
    """Requests that have finished, with counts and labels that may contradict each other."""
    counts, prompts = (rng.choices(COUNTS[:5], k=rng.choice([0, 1, 2])) for _ in range(2))
    return {
        "used": tuple(rng.choices(KEYS, k=rng.choice([sum(counts) % 16, 3]))),
        "used_counts": IntArray.of(counts, "u4"),
        "prompt_counts": IntArray.of(rng.choice([counts, prompts]), "u4"),
        "labels": rng.choice([b"", bytes(rng.randrange(256) for _ in counts), b"\0" * 3]),
    }


def _slots(rng: random.Random, count: int) -> dict[str, Any]:
    if rng.random() < 0.5:  # a slot with the generation that it was lent with
        places = rng.choices(range(8), k=count)
        slots = arrays([SLOT + at for at in places], [GENERATION + at for at in places])
    else:
        slots = arrays(rng.choices(SLOTS, k=count), rng.choices(GENERATIONS, k=count))
    if rng.random() < 0.1:
        slots["generations"] = IntArray.of(tuple(range(count + 1)), "u8")
    return slots


PARTS: list[Callable[[random.Random], dict[str, Any]]] = [
    _begun,
    _begun,
    _parts,
    _pins,
    lambda rng: {"unpinned": tuple(rng.choices(LEASES, k=3))},
    lambda rng: {"dropped": tuple(rng.choices(KEYS, k=2))},
    lambda rng: {"used": tuple(rng.choices(KEYS, k=4))},
    _uses,
    lambda rng: {name: tuple(rng.choices(KEYS, k=2)) for name in ("missed", "unstored")},
    lambda rng: {"wanted": rng.choice(MANY)},
    lambda rng: {name: rng.choice(OFFERS) for name in ("present", "pending", "refused", "not_yet")},
]


SOCKETS: tuple[Where, ...] = ("broker", "lane")
SIZES = (4096, 0, 1, 65536, 1099511627776)
FDS = (
    *(f"mem:{size}" for size in SIZES),
    *("loose:65536", "pipe", "null", "zero"),
    *("folder", "socket", "event", "write-only", "own connection"),
)
ABSURD = (b"\xff", b"\0", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff", b"\xdf" * 5)
Change = Callable[[Script, random.Random], Script]


def _on_frame(change: Callable[[bytes, random.Random], bytes]) -> Change:
    """A change of one frame somewhere in the script."""

    def apply(script: Script, rng: random.Random) -> Script:
        places = [i for i, step in enumerate(script) if step.frame]
        if not places:
            return script
        place = rng.choice(places)
        step = script[place]
        return _with(script, place, replace(step, frame=change(step.frame, rng)))

    return apply


def _with(script: Script, place: int, *steps: Act) -> Script:
    return script[:place] + steps + script[place + 1 :]


def _inserted(script: Script, place: int, *steps: Act) -> Script:
    return script[:place] + steps + script[place:]


# ------------------------------------------------------------------- of frames


def _flip(frame: bytes, rng: random.Random) -> bytes:
    data = bytearray(frame)
    for _ in range(rng.choice([1, 1, 2, 8])):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _overwrite(frame: bytes, rng: random.Random) -> bytes:
    """Other bytes in place of some, or of the rest, or of nothing at the end."""
    place = rng.randrange(len(frame) + 1)
    match rng.randrange(3):
        case 0:
            return frame[:place] + rng.choice(ABSURD) + frame[place + rng.randint(1, 4) :]
        case 1:
            return frame[:place]
        case _:
            return frame + rng.choice([b"\0", frame, frame[HEADER_BYTES:], rng.randbytes(64)])


def _field(frame: bytes, rng: random.Random) -> bytes:
    """Another value for a field, near the one that it has."""
    try:
        new = changed(rng, msgspec.msgpack.decode(frame[HEADER_BYTES:]))
        return frame[:HEADER_BYTES] + msgspec.msgpack.encode(new)
    except (ValueError, OverflowError, msgspec.DecodeError):
        return _flip(frame, rng)


def _header(frame: bytes, rng: random.Random) -> bytes:
    """A wrong magic, version, tag or id."""
    data = bytearray(frame.ljust(HEADER_BYTES, b"\0"))
    match rng.randrange(4):
        case 0:
            data[rng.randrange(6)] ^= 1 << rng.randrange(8)
        case 1 | 2:
            data[6:8] = rng.choice([*TAGS, 0, 0x101, 0xFFFF]).to_bytes(2, "little")
        case _:
            data[8:16] = rng.choice([0, 1, 2**63, 2**64 - 1]).to_bytes(8, "little")
    return bytes(data)


def _large(frame: bytes, rng: random.Random) -> bytes:
    """A body of absurd size, at the limits of arrays, maps, strings and messages."""
    many = rng.choice([65535, 65536, 65537])
    match rng.randrange(5):
        case 0:
            body: dict[str, Any] = {"keys": [b"k%d" % i for i in range(many)]}
        case 1:
            body = {"keys": [bytes(rng.choice([48, 49]))] * 2000, "jobs": list(range(1000))}
        case 2:
            body = {f"f{i}": i for i in range(rng.choice([1023, 1024, 1025]))}
        case 3:
            return frame[:HEADER_BYTES] + b"\x91" * many + b"\xc0"
        case _:
            size = rng.choice([2**20, MAX_MESSAGE_BYTES - len(frame), MAX_MESSAGE_BYTES + 1])
            return frame[:HEADER_BYTES] + bytes(size if rng.random() < 0.1 else 2**18)
    return frame[:HEADER_BYTES] + msgspec.msgpack.encode(body)


# ----------------------------------------------------------------- of sequences


def _drop(script: Script, rng: random.Random) -> Script:
    return _with(script, rng.randrange(len(script)))


def _duplicate(script: Script, rng: random.Random) -> Script:
    place = rng.randrange(len(script))
    return _with(script, place, *[script[place]] * rng.choice([2, 2, 3, 20]))


def _move(script: Script, rng: random.Random) -> Script:
    place = rng.randrange(len(script))
    return _inserted(_with(script, place), rng.randrange(len(script)), script[place])


def _splice(script: Script, rng: random.Random) -> Script:
    other = session(rng)
    first = rng.randrange(len(other))
    part = other[first : first + rng.randint(1, 8)]
    return _inserted(script, rng.randint(0, len(script)), *part)


def _other(script: Script, rng: random.Random) -> Script:
    """Another connection, or another actor."""
    place = rng.randrange(len(script))
    if rng.random() < 0.5:
        return _with(script, place, replace(script[place], where=rng.choice(SOCKETS)))
    return _with(script, place, replace(script[place], actor=rng.choice([0, 1, 2, 9])))


def _bare(script: Script, rng: random.Random) -> Script:
    """Bytes that are no message of one part, or more than one message."""
    place = rng.randrange(len(script))
    frame = script[place].frame
    message = frame_header(len(frame)) + frame
    part = bytes((message[0] | MORE, *message[1:2])) + message[2:]
    choices = [part, message * 3, message[: rng.randrange(len(message))], command(b"PING", b"\0\0")]
    choices += [message + command(b"PING", rng.randbytes(9)), b"\xff" * 9, rng.randbytes(40)]
    return _with(script, place, replace(script[place], frame=rng.choice(choices), bare=True))


def _descriptors(script: Script, rng: random.Random) -> Script:
    """Other descriptors: more, fewer, of another kind, smaller than was said."""
    places = [i for i, step in enumerate(script) if step.fds or rng.random() < 0.05]
    if not places:
        return script
    place = rng.choice(places)
    fds = list(script[place].fds)
    choice = rng.randrange(4)
    if choice == 0 and fds:
        fds[rng.randrange(len(fds))] = rng.choice(FDS)
    elif choice == 1:
        fds += [rng.choice(FDS)] * rng.choice([1, 1, 60, 64])
    elif choice == 2:
        fds = fds[: rng.randint(0, len(fds))]
    else:
        rng.shuffle(fds)
    return _with(script, place, replace(script[place], fds=tuple(fds)))


def _meanwhile(script: Script, rng: random.Random) -> Script:
    """Somebody leaves, or time passes."""
    left, passed = Act(rng.choice([0, 1, 2]), "close"), Act(rng.choice([1, 3, 30]), "time")
    return _inserted(script, rng.randint(0, len(script)), rng.choice([left, passed]))


def _step(script: Script, rng: random.Random) -> Script:
    """A scheduler says what it may not, or what makes no sense."""
    id_ = rng.choice([0, 1, 1000 + rng.randrange(1000)])
    act = request(rng.choice([0, 0, 0, 20]), "broker", hostile_step(rng), id_)
    return _inserted(script, rng.randint(0, len(script)), act)


CHANGES: dict[str, Change] = {
    "flip": _on_frame(_flip),
    "overwrite": _on_frame(_overwrite),
    "field": _on_frame(_field),
    "header": _on_frame(_header),
    "large": _on_frame(_large),
    "drop": _drop,
    "duplicate": _duplicate,
    "move": _move,
    "splice": _splice,
    "other": _other,
    "bare": _bare,
    "descriptors": _descriptors,
    "meanwhile": _meanwhile,
    "step": _step,
}
COMMON = ["field"] * 14 + ["flip"] * 2 + ["step"] * 6
COMMON += [name for name in CHANGES if name != "large"] + ["overwrite", "other", "meanwhile"]


def mutated(script: Script, changes: Sequence[tuple[str, int]]) -> Script:
    """The script after these changes, each with a seed of its own."""
    for name, seed in changes:
        if script:
            script = CHANGES[name](script, random.Random(seed))
    return script


def random_script(rng: random.Random) -> Script:
    """A mutated session; now and then two, interleaved, or a frame of absurd size."""
    script = session(rng)
    if rng.random() < 0.2:
        queues = [list(script), list(session(rng, base=20))]
        turns = [queue for queue in queues for _ in queue]
        rng.shuffle(turns)
        script = tuple(queue.pop(0) for queue in turns)
    names = rng.choices(COMMON, k=rng.choice([0, 1, 1, 2, 3, 6]))
    if rng.random() < 0.02:
        names.append("large")
    return mutated(script, [(name, rng.getrandbits(32)) for name in names])
