"""`python -m kvd.lane LINK_FD`: a lane process, which only the broker starts."""

import sys

from kvd.machine.process import die_with_parent, gc_paused


def main() -> int:
    """Serve until the broker stops the process; return the exit status."""
    die_with_parent()  # before the imports that take long
    with gc_paused():
        from kvd.lane.loop import run  # noqa: PLC0415

    return run(int(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
