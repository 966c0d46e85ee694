"""A device by its UUID, never by its index: indices differ from process to process."""

import os
import re
from itertools import pairwise

from kvd.errors import CudaMissing, LaneError
from kvd.lane.cuda import driver

_FORM = re.compile(r"(?:cuda:)?(?P<kind>GPU-|MIG-)?(?P<hex>[0-9a-f]{32})", re.IGNORECASE)


def parse(name: str) -> bytes:
    """The UUID in a device's name.

    Args:
        name: "cuda:" and 32 hexadecimal digits; dashes, and GPU- or MIG- before them, may be there.

    Raises:
        LaneError: it is none.
    """
    match = _match(name)
    return bytes.fromhex(match["hex"])


def show_slice(name: str) -> None:
    """Let this process see the MIG slice that is named, if one is.

    A process sees no more than one slice, and which one is settled before the driver starts.

    Raises:
        LaneError: it is no device's name.
    """
    match = _match(name)
    if (match["kind"] or "").upper() == "MIG-":
        digits = match["hex"].lower()
        cuts = (0, 8, 12, 16, 20, 32)
        dashed = "-".join(digits[a:b] for a, b in pairwise(cuts))
        os.environ["CUDA_VISIBLE_DEVICES"] = f"MIG-{dashed}"


def find(name: str) -> int:
    """The driver's handle of the device with this name.

    Raises:
        LaneError: it is no device's name.
        CudaMissing: no device that this process sees has this UUID.
        CudaError: the driver fails.
    """
    uuid = parse(name)
    seen = driver.devices()
    for device, other in seen:
        if other == uuid:
            return device
    listed = ", ".join(other.hex() for _, other in seen) or "none"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hint = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
    raise CudaMissing(
        f"no CUDA device has the UUID {uuid.hex()}; the lane sees {listed}{hint}. Let kvd see all"
        " devices (NVIDIA_VISIBLE_DEVICES=all), and name a MIG slice as cuda:MIG-<uuid>"
    )


def _match(name: str) -> re.Match[str]:
    # "GPU-" keeps its dash; those inside the digits are for people.
    head, _, tail = name.rpartition("GPU-" if "GPU-" in name else "MIG-")
    kind = name[len(head) : len(name) - len(tail)]
    match = _FORM.fullmatch(head + kind + tail.replace("-", ""))
    if match is None:
        raise LaneError(
            f"{name!r} names no CUDA device; write cuda: and the 32 hexadecimal digits of its"
            " UUID, which nvidia-smi -L shows"
        )
    return match
