"""Whether torch reads one layer's blocks slower where a block holds all layers.

It shows what distance costs: a layer's pages lie side by side where layers are outermost, and
as far apart as a block is long where blocks are. The kernels are torch's (index_select, then
scaled_dot_product_attention over what it gathered). It does not show a paged attention kernel
of an engine, which reads the pages itself and may do better or worse.
"""

import time
from collections.abc import Callable

import torch
from gpu_figures import Spread, spread

LAYERS, HEADS, TOKENS, WIDTH = 32, 8, 16, 128  # a page of 64 KiB, a block of 2 MiB
BLOCKS, REQUEST_BLOCKS = 1024, 256  # 2 GiB; a request of 4096 tokens
ROUNDS, SECONDS = 25, 8.0  # seconds of each work
WARM_SECONDS = 0.1


class Memory:
    """KV bytes of several layers, the same for both layouts.

    Args:
        blocks_outermost: where a block's layers lie side by side.
        device: of torch.
        layers, blocks: how many.
        request: blocks of one request, anywhere.
    """

    def __init__(
        self,
        *,
        blocks_outermost: bool,
        device: str = "cuda",
        layers: int = LAYERS,
        blocks: int = BLOCKS,
        request: int = REQUEST_BLOCKS,
    ) -> None:
        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=generator)

        generator = torch.Generator(device).manual_seed(0)
        page = (2, HEADS, TOKENS, WIDTH)
        outer = (blocks, layers) if blocks_outermost else (layers, blocks)
        whole = torch.empty(*outer, *page, device=device, dtype=torch.bfloat16)
        self._layers = [whole[:, i] if blocks_outermost else whole[i] for i in range(layers)]
        for layer in self._layers:
            layer.copy_(noise(blocks, *page))
        self._request = torch.randperm(blocks, device=device, generator=generator)[:request]
        self._query = noise(1, HEADS, 1, WIDTH)

    def gather(self) -> torch.Tensor:
        """The request's pages of every layer, into one place; the last layer's."""
        for layer in self._layers:
            pages = torch.index_select(layer, 0, self._request)
        return pages

    def attend(self) -> torch.Tensor:
        """A decode step's attention of every layer, over pages gathered before; the last one's."""
        for layer in self._layers:
            pages = torch.index_select(layer, 0, self._request)
            keys, values = pages.permute(1, 2, 0, 3, 4).flatten(2, 3).unsqueeze(1).unbind(0)
            out = torch.nn.functional.scaled_dot_product_attention(self._query, keys, values)
        return out


def measure(rounds: int = ROUNDS) -> dict[str, Spread]:
    """Microseconds a layer by work and layout, and the ratio of blocks to layers outermost.

    Raises:
        RuntimeError: torch sees no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU")
    layouts = {"layers": Memory(blocks_outermost=False), "blocks": Memory(blocks_outermost=True)}
    samples: dict[str, list[float]] = {}
    for work in ("gather", "attend"):
        end = time.monotonic() + SECONDS
        for number in range(rounds + 1):
            if number > 1 and time.monotonic() > end:
                break
            order = list(layouts) if number % 2 else list(reversed(layouts))
            took = {layout: _microseconds(getattr(layouts[layout], work)) for layout in order}
            if number:
                for layout, microseconds in took.items():
                    samples.setdefault(f"{work}_{layout}_us", []).append(microseconds / LAYERS)
                samples.setdefault(f"{work}_ratio", []).append(took["blocks"] / took["layers"])
    return {name: spread(values) for name, values in samples.items()}


def _microseconds(work: Callable[[], object]) -> float:
    """Of one time, measured on the device, after some that warm it up."""
    end = time.monotonic() + WARM_SECONDS
    while time.monotonic() < end:
        work()
        torch.cuda.synchronize()
    before, after = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        for _ in range(2)
    )
    work()  # what is enqueued behind it waits for nobody
    before.record()
    work()
    after.record()
    torch.cuda.synchronize()
    return float(before.elapsed_time(after) * 1e3)
