"""An engine's HTTP server with forked processes: `python -m kvd_tools.forked_server ENGINE ARG...`.

On a CPU both engines start each of their processes anew, and each imports the engine for ten
seconds. Forked processes have it already. vLLM starts them anew so that each process reads which
cores it gets; `VllmServer` binds none to cores, so all get the same.
"""

import multiprocessing
import os
import runpy
import sys
from typing import Any


def fork_vllm() -> str:
    """Make vLLM fork its processes; return the module of its server."""
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415  # one of two engines

    configure = AsyncEngineArgs.create_engine_config

    def configure_forking(*args: Any, **keywords: Any) -> Any:
        config = configure(*args, **keywords)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        return config

    AsyncEngineArgs.create_engine_config = configure_forking
    return "vllm.entrypoints.launchers.api_server.entry"


def fork_sglang() -> str:
    """Make SGLang fork its processes; return the module of its server."""
    set_start_method = multiprocessing.set_start_method

    def set_fork(*_: Any, **__: Any) -> None:
        set_start_method("fork", force=True)

    multiprocessing.set_start_method = set_fork
    return "sglang.launch_server"


def main() -> None:
    """Run the server as `python -m` would."""
    module = {"vllm": fork_vllm, "sglang": fork_sglang}[sys.argv.pop(1)]()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
