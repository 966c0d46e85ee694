"""What the ranks of one engine must decide alike."""

from typing import Any

import torch
import torch.distributed as dist


class Ranks:
    """The processes that serve the same requests in step.

    Args:
        params: SGLang's `CacheInitParams`, with the groups that its tree agrees in.
    """

    def __init__(self, params: Any) -> None:
        groups = [params.attn_cp_cache_group, params.attn_tp_cache_group]
        self._groups = [g for g in groups if g is not None and dist.get_world_size(group=g) > 1]
        whole = params.tp_cache_group
        if not self._groups and whole is not None and dist.get_world_size(group=whole) > 1:
            self._groups = [whole]
        tensor = params.attn_tp_cache_group or whole
        self.rank = 0 if tensor is None else dist.get_rank(group=tensor)
        self.size = 1 if tensor is None else dist.get_world_size(group=tensor)

    def all(self, yes: bool) -> bool:
        """Whether all ranks say yes; each must ask as often, in the same order."""
        if not self._groups:
            return yes
        word = torch.tensor([int(yes)], dtype=torch.int)
        for group in self._groups:
            dist.all_reduce(word, op=dist.ReduceOp.MIN, group=group)
        return bool(word.item())

    def __repr__(self) -> str:
        return f"<Ranks {self.rank} of {self.size}>"
