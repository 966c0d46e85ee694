"""The guide's example with torch as a whole program: it stores, loads and compares."""

import os
import re
from pathlib import Path

GUIDE = Path(__file__).parents[1] / "docs" / "writing-a-client.md"
SOURCE_PATH = f"{GUIDE.parents[1]}:{os.environ.get('PYTHONPATH', '')}"
"""The program's PYTHONPATH: it imports from `tests`."""

_FRAME = """
import sys
from kvd_client import Scheduler
from tests.waiting import DEADLINE, PATIENCE, eventually

runtime_dir, way = sys.argv[1:]
layers = [torch.zeros(8, 2, 512, dtype=torch.bfloat16) for _ in range(3)]
content = [torch.randn(4, 2, 512).to(torch.bfloat16) for _ in layers]
keys = [f"{way} {number}".encode() for number in range(4)]
with (
    Scheduler(runtime_dir, "torch", deadline=DEADLINE) as scheduler,
    Worker(runtime_dir, "torch", rank=0, world_size=1, deadline=DEADLINE) as worker,
):
    worker.register.__func__.__kwdefaults__["transfer"] = way
    assert register(worker, layers, 16)
    assert scheduler.wait_attached(PATIENCE) and worker.wait_attached(PATIENCE)
    for layer, values in zip(layers, content, strict=True):
        layer[:4] = values
    with scheduler.prepare_store(keys) as stores:
        assert store(worker, 1, stores, [ChunkBlocks(keys, [0, 1, 2, 3])])
        worker.wait([1])
    eventually(lambda: all(scheduler.lookup(key).name == "HIT" for key in keys))
    with scheduler.prepare_load(keys) as loads:
        assert loads.found.all()
        blocks = [ChunkBlocks(keys, [7, 6, 5, 4])]
        assert worker.load(2, loads, blocks, after=work_so_far(worker))
        worker.wait([2])
    assert all(result.success for result in worker.get_finished())
    equal = all(torch.equal(layer[4:].flip(0), values)
                for layer, values in zip(layers, content, strict=True))
    print(worker.transfer, equal)
"""


def write_torch_engine(folder: Path) -> Path:
    """Write the program, which takes the runtime directory and the value of `transfer`.

    It prints the way that its memory went, and whether it loaded what it had stored.
    """
    (example,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
        if "describe_torch" in block
    ]
    file = folder / "torch_engine.py"
    file.write_text(example + _FRAME, encoding="utf-8")
    return file
