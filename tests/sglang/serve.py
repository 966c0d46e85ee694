"""An SGLang engine that answers requests on a pipe: `python -m tests.sglang.serve FD OPTIONS`."""

import json
import os
import sys
from typing import Any


def main() -> None:
    """Serve until the end of standard input."""
    import sglang  # noqa: PLC0415  # its processes import this module again, without an engine

    with os.fdopen(int(sys.argv[1]), "w") as answers:

        def answer(value: Any) -> None:
            answers.write(json.dumps(value) + "\n")
            answers.flush()

        engine = sglang.Engine(**json.loads(sys.argv[2]))
        answer("ready")
        for line in sys.stdin:
            request = json.loads(line)
            try:
                if request == "flush":
                    answer(bool(engine.flush_cache().success))
                else:
                    answer(engine.generate(**request))
            except Exception as error:  # noqa: BLE001  # the test is told
                answer({"error": repr(error)})
        engine.shutdown()


if __name__ == "__main__":
    main()
