"""Who may connect: the settings `allow_users` and `allow_groups`.

The file rights of the runtime directory come first: a process that cannot open the socket
never gets here. A list restricts them further.
"""

import grp
import os
import pwd
from collections.abc import Callable

from kvd.client_names import Peer
from kvd.config.values import names_in
from kvd.errors import ConfigError


class AllowList:
    """The users and groups that may connect; everybody where both settings are empty.

    The daemon's own user always may, and so may root, who can do anything.

    Args:
        users, groups: the settings; names are this machine's.

    Raises:
        ConfigError: a name that this machine does not know.
    """

    def __init__(self, users: str, groups: str) -> None:
        self.users = _ids("allow_users", users, lambda name: pwd.getpwnam(name).pw_uid)
        self.groups = _ids("allow_groups", groups, lambda name: grp.getgrnam(name).gr_gid)

    def objection(self, peer: Peer) -> str:
        """Return why the peer may not connect, for its operator; empty where it may."""
        if not self.users and not self.groups:
            return ""
        if peer.uid in {0, os.geteuid(), *self.users}:
            return ""
        if not self.groups.isdisjoint((peer.gid, *peer.groups)):
            return ""
        return (
            f"uid {peer.uid}, gid {peer.gid} may not use this daemon: its settings allow_users and"
            " allow_groups name others"
        )


def _ids(key: str, text: str, find: Callable[[str], int]) -> frozenset[int]:
    ids = set()
    for item in names_in(text):
        try:
            ids.add(int(item) if item.isdecimal() else find(item))
        except KeyError:
            raise ConfigError(
                f"{key} = {text!r}: {item!r} is not known on this machine; create it, or give its"
                " number"
            ) from None
    return frozenset(ids)
