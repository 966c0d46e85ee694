"""The settings `allow_users` and `allow_groups` as ids of this machine."""

import grp
import os
import pwd
from collections.abc import Callable

from kvd.broker.entry import AllowList
from kvd.config.values import names_in
from kvd.errors import ConfigError


def allow_list(users: str, groups: str) -> AllowList:
    """Who may come in, by this machine's lists of users and groups.

    Raises:
        ConfigError: a name that this machine does not know.
    """
    return AllowList(
        os.geteuid(),
        _ids("allow_users", users, lambda name: pwd.getpwnam(name).pw_uid),
        _ids("allow_groups", groups, lambda name: grp.getgrnam(name).gr_gid),
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
