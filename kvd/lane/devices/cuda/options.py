"""What may be chosen about a CUDA device, for the benchmarks that look for the best.

The environment variable LANE_CUDA of a lane's process names some, with commas:

    LANE_CUDA="bulk=16MiB,blocks=12,order=stream,overlap=0"

| name | value | meaning |
|---|---|---|
| `piece` | bytes | of a piece while other jobs wait for a turn |
| `bulk` | bytes | of a piece while none does |
| `flight` | bytes | in flight in each direction, above which no more is asked for |
| `kernel` | bytes | runs shorter than this go by the kernel, 0: none; measured where not named |
| `blocks` | number | of a launch of the kernel, at most; 8 warps each |
| `order` | `any`, `stream` | in which the pool may be read by loads; measured where not named |
| `overlap` | 0, 1 | ask batches for the copy engines only (drivers from CUDA 13.1 on) |
| `inline` | number | runs of a piece that the lane's thread enqueues; timed where not named |

Bytes are numbers, or numbers with KiB or MiB.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvd.errors import LaneError
from kvd.lane.devices.cuda.move_kernel import BLOCKS
from kvd.lane.devices.device import PIECE_BYTES, Direction

VARIABLE = "LANE_CUDA"
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20}
_ORDERS = {"any": True, "stream": False}
_SWITCH = {"0": False, "1": True}


@dataclass(frozen=True, slots=True)
class Options:
    """What may be chosen about a device.

    registration_bytes: of one registration of the pool; see PinnedPool.
    piece_bytes, bulk_bytes: see Device.
    bytes_in_flight: of each direction, above which no more is asked for.
    stuck_seconds: after which a device that ends nothing is given up.
    kernel_below: runs shorter than this many bytes go by the kernel; measured where None.
    kernel_blocks: of a launch, at most.
    any_order: loads may read the pool in any order; measured where None.
    overlap: ask batches for the copy engines only, where driver and device take that.
    inline_runs: pieces of at most so many runs are enqueued by the lane's thread itself; as
        timed where None.
    """

    registration_bytes: int | None = None
    piece_bytes: int = PIECE_BYTES
    bulk_bytes: int = 32 * 2**20
    bytes_in_flight: int = 64 * 2**20
    stuck_seconds: float = 120.0
    kernel_below: Mapping[Direction, int] | None = None
    kernel_blocks: int = BLOCKS
    any_order: bool | None = None
    overlap: bool = True
    inline_runs: int | None = None


def read(text: str) -> Options:
    """The options that a text names, see above; empty names none.

    Raises:
        LaneError: a name or a value that there is not.
    """
    chosen: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.strip().partition("=")
        try:
            match name:
                case "piece":
                    chosen["piece_bytes"] = _bytes(value)
                case "bulk":
                    chosen["bulk_bytes"] = _bytes(value)
                case "flight":
                    chosen["bytes_in_flight"] = _bytes(value)
                case "kernel":
                    chosen["kernel_below"] = dict.fromkeys(Direction, _bytes(value))
                case "blocks":
                    chosen["kernel_blocks"] = max(1, int(value))
                case "order":
                    chosen["any_order"] = _ORDERS[value]
                case "overlap":
                    chosen["overlap"] = _SWITCH[value]
                case "inline":
                    chosen["inline_runs"] = int(value)
                case _:
                    raise KeyError(name)
        except (KeyError, ValueError) as error:
            raise LaneError(
                f"{VARIABLE}={text}: '{item}' is not understood; see the table at the top of"
                f" {__name__}"
            ) from error
    return replace(Options(), **chosen)


def _bytes(text: str) -> int:
    digits = text.rstrip("KMiB")
    return int(digits) * _UNITS[text[len(digits) :]]
