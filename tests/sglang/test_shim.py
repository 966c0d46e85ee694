"""The stand-ins for what SGLang lacks on a CPU compute what they should."""

import os
import subprocess
import sys

import pytest
import torch

from tests.sglang.stand_ins.vllm._custom_ops import rotary_embedding

TOKENS, HEADS, SIZE, POSITIONS = 5, 3, 16, 40


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotated", [16, 8])
def test_the_rotary_embedding_is_a_rotation_of_pairs(rotated: int, is_neox: bool) -> None:
    """Each pair is multiplied as a complex number, the rest of a head stays as it is."""
    generator = torch.Generator().manual_seed(1)
    angles = torch.rand(POSITIONS, rotated // 2, generator=generator)
    cache = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.randint(POSITIONS, (TOKENS,), generator=generator)
    query = torch.randn(TOKENS, HEADS * SIZE, generator=generator)
    expected = query.view(TOKENS, HEADS, SIZE).clone()
    half = rotated // 2
    for token, position in enumerate(positions.tolist()):
        for i in range(half):
            a, b = (i, i + half) if is_neox else (2 * i, 2 * i + 1)
            pair = torch.complex(expected[token, :, a], expected[token, :, b])
            turned = pair * torch.polar(torch.tensor(1.0), angles[position, i])
            expected[token, :, a], expected[token, :, b] = turned.real, turned.imag
    rotary_embedding(positions, query, None, SIZE, cache, is_neox)
    torch.testing.assert_close(query.view(TOKENS, HEADS, SIZE), expected)


def test_kernels_are_interpreted_rightly() -> None:
    """Triton's interpreter runs autotuned kernels and SGLang's convolutions, as torch does."""
    subprocess.run(
        [sys.executable, "-m", "tests.sglang.interpreted"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        check=True,
    )
