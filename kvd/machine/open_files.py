"""The limit of open files, RLIMIT_NOFILE: raised at a start, named where it is reached."""

import errno
import os
import resource


def raise_descriptor_limit() -> None:
    """Have as many descriptors as the hard limit allows: sessions and their memory bring them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def open_files_remedy() -> str:
    """Return what to do where no descriptor is left, with this process's limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"raise LimitNOFILE (ulimit -n), now {limit}"


def is_out_of_files(error: BaseException | None) -> bool:
    """Whether an error says that no file can be opened, here or on the whole machine."""
    return isinstance(error, OSError) and error.errno in {errno.EMFILE, errno.ENFILE}


def free_descriptors() -> int:
    """Return how many files this process may still open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return limit - len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # no paths are needed
    except OSError:  # to look takes one
        return 0
