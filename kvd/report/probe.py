"""`python -m kvd.report.probe /readyz`: a probe for use inside a container, over the Unix socket.

Exit status 0 for a 2xx answer, 1 otherwise. It runs every few seconds, so it imports only the
standard library.
"""

import os
import sys
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from socket import AF_UNIX, socket

_SECONDS = 4.0  # under the 5 s that probes are given


class _Unix(HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket(AF_UNIX)
        self.sock.settimeout(_SECONDS)
        self.sock.connect(str(self._path))


def main(arguments: list[str]) -> int:
    """Request the path in `arguments` (by default /readyz); return the exit status."""
    path = Path(os.environ.get("KVD_RUNTIME_DIR", "/run/kvd")) / "http.sock"
    try:
        connection = _Unix(path)
        connection.request("GET", arguments[0] if arguments else "/readyz")
        response = connection.getresponse()
        text = response.read().decode("utf-8", "replace")
    except (OSError, HTTPException) as error:
        sys.stderr.write(f"{path}: {error}; start kvd serve, or set KVD_RUNTIME_DIR\n")
        return 1
    sys.stdout.write(text)
    return 0 if response.status // 100 == 2 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
