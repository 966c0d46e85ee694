"""The rotary embedding, which SGLang takes from vLLM where its own kernels are not installed."""

import torch


def rotary_embedding(  # vLLM's signature
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,  # vLLM's signature
) -> None:
    """Rotate query and key in place (RoFormer, arXiv 2104.09864).

    Args:
        positions: [tokens].
        query: [tokens, heads * head_size].
        key: the same of its own heads, or None.
        head_size: elements of a head.
        cos_sin_cache: [positions, rotated], cosines first, then sines.
        is_neox: pairs are elements i and i + rotated / 2; otherwise 2i and 2i + 1.
    """
    cos, sin = cos_sin_cache.index_select(0, positions.flatten()).chunk(2, dim=-1)
    cos, sin = cos[:, None].float(), sin[:, None].float()
    half = cos.shape[-1]
    for states in (query, key):
        if states is None:
            continue
        heads = states.view(states.shape[0], -1, head_size)[..., : 2 * half]
        one, two = (
            (heads[..., :half], heads[..., half:])
            if is_neox
            else (heads[..., 0::2], heads[..., 1::2])
        )
        first, second = one.float(), two.float()
        # Both before either is written: of float32 these are views.
        turned, other = first * cos - second * sin, second * cos + first * sin
        one.copy_(turned)
        two.copy_(other)
