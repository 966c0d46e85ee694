"""Names of devices: "host", or "cuda:" and the UUID of a GPU as 32 hex digits.

The UUID of a MIG instance has "MIG-" before it, for a process must be told
before it starts the driver that it is to see one.
Never an index: what CUDA_VISIBLE_DEVICES hides or reorders has the same UUID everywhere.
"""

import re

HOST = "host"
_CUDA = re.compile(r"cuda:(MIG-)?[0-9a-f]{32}")


def cuda_device(uuid: bytes, *, mig: bool = False) -> str:
    """The name of the device with this UUID, a MIG instance or a whole GPU.

    Raises:
        ValueError: not 16 bytes.
    """
    if len(uuid) != 16:
        raise ValueError(f"a device's UUID has 16 bytes, not {len(uuid)}")
    return f"cuda:{'MIG-' if mig else ''}{uuid.hex()}"


def is_cuda_device(name: str) -> bool:
    """Whether `name` names a CUDA device by its UUID."""
    return _CUDA.fullmatch(name) is not None
