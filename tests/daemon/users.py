"""Connecting as another user, where the tests may become one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

OTHER_UID = 4242
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@contextmanager
def as_stranger(uid: int = OTHER_UID) -> Iterator[None]:
    """This process is this user's within, and in no group but one of the same number."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


@contextmanager
def as_user(uid: int = OTHER_UID) -> Iterator[None]:
    """Connections made within are this user's, of root's group, which the sockets are open to."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
