"""Checks of what Triton's interpreter needs to run SGLang's kernels.

    TRITON_INTERPRET=1 python -m tests.sglang.interpreted

In a process of its own: whether kernels are interpreted is decided when they are imported.
"""

import torch
from sglang.kernels.ops.mamba.triton_ops.ssd_chunk_state import _chunk_cumsum_fwd
from sglang.srt.layers.attention.mamba.mamba import causal_conv1d_fn, causal_conv1d_update
from torch.nn.functional import conv1d

FEATURES, WIDTH, SLOTS = 24, 3, 5
LENGTHS = (8, 21)  # the first fills a block of the kernel
TOKENS, HEADS, CHUNK = 32, 3, 8


def check_autotuned() -> None:
    """A kernel with several configurations, started on the device of its tensors, is right."""
    generator = torch.Generator().manual_seed(1)
    times = torch.rand(1, TOKENS, HEADS, generator=generator)
    rates = -torch.rand(HEADS, generator=generator)
    sums, _ = _chunk_cumsum_fwd(times, rates, CHUNK)
    chunks = (times * rates).view(1, TOKENS // CHUNK, CHUNK, HEADS)
    torch.testing.assert_close(sums, chunks.cumsum(dim=2).permute(0, 3, 1, 2))


def check_convolutions() -> None:
    """SGLang's convolutions, with blocks that are full and states that go on, are torch's."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(FEATURES, sum(LENGTHS), generator=generator)
    weight = torch.randn(FEATURES, WIDTH, generator=generator)
    states = torch.randn(SLOTS, FEATURES, WIDTH - 1, generator=generator)
    slots = torch.tensor([3, 1])
    before = states[slots]
    before[0] = 0  # has none
    ends = (LENGTHS[0], sum(LENGTHS))
    parts = [tokens[:, end - length : end] for length, end in zip(LENGTHS, ends, strict=True)]
    joined = [torch.cat(pair, dim=1) for pair in zip(before, parts, strict=True)]
    found = causal_conv1d_fn(
        tokens,
        weight,
        None,
        conv_states=states,
        query_start_loc=torch.tensor([0, *ends], dtype=torch.int32),
        seq_lens_cpu=list(LENGTHS),
        cache_indices=slots,
        has_initial_state=torch.tensor([False, True]),
        activation=None,
    )
    right = [conv1d(part[None], weight[:, None], groups=FEATURES)[0] for part in joined]
    torch.testing.assert_close(found, torch.cat(right, dim=1))
    last = torch.stack([part[:, 1 - WIDTH :] for part in joined])
    torch.testing.assert_close(states[slots], last)
    new = torch.randn(len(LENGTHS), FEATURES, generator=generator)
    after = torch.cat([last, new[:, :, None]], dim=2)
    found = causal_conv1d_update(new, states, weight, conv_state_indices=slots)
    torch.testing.assert_close(found, (after * weight).sum(dim=2))
    torch.testing.assert_close(states[slots], after[:, :, 1:])


if __name__ == "__main__":
    check_autotuned()
    check_convolutions()
