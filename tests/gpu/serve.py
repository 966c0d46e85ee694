"""`kvd serve` without its command line: for a Python that has neither click nor rich.

    python tests/gpu/serve.py --runtime-dir DIRECTORY --cpu-bytes 64MiB

Every option is that of a setting, with its value; the daemon is the same.
"""

import sys

from kvd.config.sources import Sources
from kvd.errors import KvdError
from kvd.logs import configure
from kvd.machine.process import raise_descriptor_limit
from kvd.server import serve
from kvd.version import VERSION


def main() -> int:
    """Serve until a signal ends it; the exit status."""
    words = sys.argv[1:]
    flags = {
        name.removeprefix("--").replace("-", "_"): value
        for name, value in zip(words[::2], words[1::2], strict=True)
    }
    sources = Sources(flags=flags)
    loaded = sources.load()
    configure(loaded.settings.log_level, loaded.settings.log_format, "broker")
    raise_descriptor_limit()
    try:
        return serve(loaded, sources, f"kvd {VERSION}", cold=False)
    except KvdError as error:
        print(f"kvd: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
