"""`python -m kvd.daemon.receiver LINK_FD`: receives the descriptors that clients send.

To close a descriptor can take as long as the owner of its file system likes (FUSE is told of
every close), and even SIGKILL does not end such a wait. A descriptor that has been received
has to be closed, so a process that must go on receives none of unknown kind. This one may
be lost: it receives, passes on what is harmless to have, and ends where something is not.

What is harmless it finds out without asking a file system: a memory file, by its seals; a
device, such as CUDA's; or an object of the kernel without a name. Whether it is the right
memory is checked by the lane.

The broker sends connections over the link. Of one to READ the next datagram is taken, whose
bytes the broker has seen already. The answer is TAKEN, with its descriptors; FOREIGN and the
number of the descriptor that was none of these; NOTHING that could be read; or FULL, where this
process may open no more files. One to DROP is closed, with what was not read.
"""

import contextlib
import ctypes
import fcntl
import os
import socket
import stat
import struct
import sys

from kvd.machine.process import tie_to_parent
from kvd.wire.seqpacket import MAX_DESCRIPTORS

READ, DROP = b"r", b"d"
TAKEN, FOREIGN, NOTHING, FULL = b"+", b"-", b"!", b"#"
_AT_EMPTY_PATH, _AT_STATX_DONT_SYNC = 0x1000, 0x4000  # linux/fcntl.h, linux/stat.h
_STATX_BYTES = 256
_MODE = struct.Struct("28xH")  # struct statx: stx_mode
_libc = ctypes.CDLL(None, use_errno=True)


def is_harmless(fd: int) -> bool:
    """Return whether the kernel alone closes the descriptor."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return _is_device(fd) or _has_no_name(fd)
    return True


def _is_device(fd: int) -> bool:
    """Answered from the kernel's memory; the file system is not asked for newer attributes."""
    found = ctypes.create_string_buffer(_STATX_BYTES)
    if _libc.statx(fd, b"", _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC, 0, found):
        return False
    return stat.S_ISCHR(_MODE.unpack_from(found)[0])


def _has_no_name(fd: int) -> bool:
    """Files of a file system are shown with a path, which begins with a slash."""
    return os.readlink(f"/proc/self/fd/{fd}").startswith("anon_inode:")  # noqa: PTH115  # no path


def _drain(connection: socket.socket) -> None:
    """Read and drop what is left; the peer would get a connection reset otherwise."""
    with contextlib.suppress(OSError):
        while connection.recv(1, socket.MSG_DONTWAIT):
            pass


def serve(link: socket.socket) -> None:
    """Serve orders until the broker is gone, or a descriptor must not be closed here."""
    with contextlib.suppress(ConnectionError):
        _serve(link)


def _serve(link: socket.socket) -> None:
    while True:
        order, connections, _, _ = socket.recv_fds(link, 16, 1, socket.MSG_CMSG_CLOEXEC)
        if not order:
            return
        if not connections:  # this process may open no more files
            if order == READ:
                link.send(FULL)
            continue
        with socket.socket(fileno=connections[0]) as connection:
            if order == DROP:
                _drain(connection)
                continue
            try:
                _, fds, flags, _ = socket.recv_fds(
                    connection, 1, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
                )
            except OSError:
                link.send(NOTHING)
                continue
        foreign = [index for index, fd in enumerate(fds) if not is_harmless(fd)]
        if foreign:
            link.send(FOREIGN + str(foreign[0]).encode())
            return
        if flags & socket.MSG_CTRUNC:
            link.send(FULL)
        else:
            socket.send_fds(link, [TAKEN], fds)
        for fd in fds:
            os.close(fd)


def main() -> None:
    """Serve the broker; what is still open is closed with the process."""
    tie_to_parent()
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)


if __name__ == "__main__":
    main()
