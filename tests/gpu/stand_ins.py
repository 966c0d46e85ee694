"""What stands in for a machine with a GPU, for the tests of `make gpu` on the test driver.

A torch that sleeps instead of computing, and a Python that has only what such a machine is sure to
have.
"""

from pathlib import Path

TORCH = """
import time, types

class Tensor:
    def __getitem__(self, key):
        return self

class Event:
    def __init__(self, enable_timing):
        pass
    def record(self):
        self.at = time.perf_counter()
    def elapsed_time(self, after):
        return (after.at - self.at) * 1e3

bfloat16 = None
cuda = types.SimpleNamespace(is_available=lambda: True, synchronize=lambda: None, Event=Event)
randn = lambda *shape, **how: Tensor()
empty_like = lambda other: Tensor()
def matmul(left, right, out):
    time.sleep(0.0001)
mv = matmul
"""

# A Python with numpy, pytest, the bindings and what kvd cannot do without, and nothing else.
BARE = """
from importlib.machinery import PathFinder

ABSENT = ("click", "rich", "psutil", "prometheus_client", "starlette", "structlog")
find = PathFinder.find_spec

class Bare:  # no function: pytest puts it into a class, where that would become a method
    def __call__(self, name, *others):
        return None if name in ABSENT else find(name, *others)

PathFinder.find_spec = Bare()
"""


def bare_python(folder: Path) -> None:
    """Let Pythons that have this folder on their path be bare, with the torch above."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(TORCH)
    (folder / "sitecustomize.py").write_text(BARE)
