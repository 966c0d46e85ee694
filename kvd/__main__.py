"""`kvd`, also as `python -m kvd`."""

import os
import sys


def _hold_standard_descriptors() -> None:
    """Where 0, 1 or 2 is closed, put /dev/null there before a lock or a pool gets that number."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one


def main() -> None:
    """Entry point of the `kvd` program."""
    _hold_standard_descriptors()
    try:
        from kvd.cli import cli  # noqa: PLC0415  # an engine's environment may lack the extra
    except ModuleNotFoundError as error:
        sys.exit(f"kvd: {error}; in kvd's source tree run: pip install '.[daemon]'")
    cli.main()


if __name__ == "__main__":
    main()
