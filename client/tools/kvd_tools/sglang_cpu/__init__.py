"""What SGLang 0.5.23 lacks on a CPU with packages from PyPI: first on its processes' PYTHONPATH.

There is no CPU wheel of its kernels (sgl-kernel), so it looks for one function of vLLM's, and the
wheel of torchvision needs CUDA for its compiled operators. `path` has stand-ins for both. They are
for tests and demonstrations; engines on GPUs need neither.
"""

import os
from pathlib import Path

PATH = Path(__file__).parent / "path"


def environment(ranks: int = 1) -> dict[str, str]:
    """The environment of an engine's process on a CPU.

    Args:
        ranks: of tensor parallelism; each gets one core.
    """
    cores = sorted(os.sched_getaffinity(0))
    before = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": f"{PATH}:{before}" if before else str(PATH),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # Without it each rank needs a NUMA node of its own.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(
            str(cores[rank % len(cores)]) for rank in range(ranks)
        ),
        "TOKENIZERS_PARALLELISM": "false",
    }
