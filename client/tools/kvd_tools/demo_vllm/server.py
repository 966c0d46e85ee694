"""vLLM's HTTP server with forked processes: `python -m kvd_tools.demo_vllm.server ARGUMENT...`.

On a CPU vLLM's configuration sets "spawn", so that each process reads which cores it gets, and
imports vLLM for ten seconds before. `EngineProcess` binds none to cores: all get the same.
"""

import os
import runpy
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs


def main() -> None:
    """Run the server as `python -m` would."""
    configure = AsyncEngineArgs.create_engine_config

    def configure_forking(*args: Any, **keywords: Any) -> Any:
        config = configure(*args, **keywords)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        return config

    AsyncEngineArgs.create_engine_config = configure_forking
    entry = "vllm.entrypoints.launchers.api_server.entry"
    runpy.run_module(entry, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
