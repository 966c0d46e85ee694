"""Who may come in: asked once for every connection, of what the kernel says of the peer.

The file rights of the runtime directory come first: whoever cannot open the sockets
is never seen here. A list makes the circle smaller.
"""

from dataclasses import dataclass

from kvd.broker.sessions import Peer

ROOT = 0


@dataclass(frozen=True, slots=True)
class AllowList:
    """The users and groups that may come in; everybody where both are empty.

    Attributes:
        own: the daemon's uid; its own processes always may, and so may root, who can do anything.
        users, groups: ids. A peer's supplementary groups count.
    """

    own: int
    users: frozenset[int] = frozenset()
    groups: frozenset[int] = frozenset()

    def objection(self, peer: Peer) -> str:
        """Why the peer may not come in, in a sentence for its operator; empty where it may."""
        if not self.users and not self.groups:
            return ""
        if peer.uid in (ROOT, self.own) or peer.uid in self.users:
            return ""
        if not self.groups.isdisjoint((peer.gid, *peer.groups)):
            return ""
        return (
            f"uid {peer.uid}, gid {peer.gid} may not use this daemon: its settings allow_users and"
            " allow_groups name others"
        )
