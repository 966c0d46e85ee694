"""Why this process may not reach a path of the daemon, with the remedy. It asks the file system."""

import grp
import os
import pwd
import stat
from pathlib import Path


def explain_denied(path: Path) -> str | None:
    """Return which directory on `path` this process may not enter, and the remedy, in one line.

    Directories are checked from the root down, because nothing below the first one can be seen.
    A file at `path` itself must be readable, a socket writable. None where nothing is denied.
    """
    real = Path(os.path.realpath(path))  # where a link cannot be read: as far as it can be
    for directory in reversed(real.parents):
        if denied := _explain(directory, "enter", os.X_OK):
            return denied
    try:
        mode = real.stat().st_mode
    except OSError:
        return None
    if stat.S_ISDIR(mode):
        return _explain(real, "enter", os.X_OK)
    if stat.S_ISSOCK(mode):
        return _explain(real, "connect to", os.W_OK)
    return _explain(real, "read", os.R_OK)


def _explain(path: Path, verb: str, access: int) -> str | None:
    try:
        status = path.stat()
    except OSError:  # it is not there
        return None
    if os.access(path, access, effective_ids=True):
        return None
    uid, mode = os.geteuid(), stat.S_IMODE(status.st_mode)
    group = _group_name(status.st_gid)
    denied = f"uid {uid} may not {verb} {path} (mode {mode:04o}, group {group})"
    if status.st_gid == 0 or not mode & (access << 3):
        owner = _user_name(status.st_uid)
        return f"{denied}: run this as {owner}{'' if owner == 'root' else ' or root'}"
    if _is_member(uid, status.st_gid):
        return f"{denied}: {_user_name(uid)} is a member now; log in again, or run: newgrp {group}"
    return f"{denied}: usermod -aG {group} {_user_name(uid)}, then log in again"


def _is_member(uid: int, gid: int) -> bool:
    """Whether the system's files put this user into the group; the process may be older."""
    try:
        user = pwd.getpwuid(uid)
        return gid in os.getgrouplist(user.pw_name, user.pw_gid)
    except KeyError:
        return False


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
