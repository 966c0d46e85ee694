"""Policies by the name that the configuration uses."""

from kvd.errors import ConfigError
from kvd.state.arc import ArcPolicy
from kvd.state.lru import LruPolicy
from kvd.state.policy import KeyOf, Policy

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (LruPolicy, ArcPolicy)}


def make_policy(name: str, num_slots: int, key_of: KeyOf) -> Policy:
    """A new policy of this name.

    Raises:
        ConfigError: no policy has this name.
    """
    if name not in POLICIES:
        raise ConfigError(f"policy {name!r} is unknown; choose one of {', '.join(POLICIES)}")
    return POLICIES[name](num_slots, key_of)
