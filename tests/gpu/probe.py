"""Whether there is an NVIDIA GPU: `python probe.py` says why not, and its exit status tells.

It needs nothing but the standard library. Run as a process of its own, it leaves
the caller without a loaded driver.
"""

import ctypes
import sys

_NO_DEVICE = 100


def missing() -> str:
    """Why there is no GPU to use; empty where there is one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver (libcuda.so.1 is not found)"
    count = ctypes.c_int(0)
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code == _NO_DEVICE or (not code and not count.value):
        return "the NVIDIA driver sees no GPU"
    if code:
        return f"the NVIDIA driver does not start (CUDA error {code})"
    return ""


if __name__ == "__main__":
    sys.exit(missing() or 0)
