"""SGLang's HTTP server with forked processes: `python -m kvd_tools.demo_sglang.server ARGUMENT...`.

SGLang starts its processes anew, and each imports it for ten seconds on two cores.
"""

import multiprocessing
import runpy
from typing import Any


def main() -> None:
    """Run the server as `python -m` would."""
    choose = multiprocessing.set_start_method

    def choose_fork(*_: Any, **__: Any) -> None:
        choose("fork", force=True)

    multiprocessing.set_start_method = choose_fork
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
