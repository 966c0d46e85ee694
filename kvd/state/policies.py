"""Policies by the name that the configuration uses."""

from kvd.state.arc import ArcPolicy
from kvd.state.lru import LruPolicy
from kvd.state.policy import Policy

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (LruPolicy, ArcPolicy)}
