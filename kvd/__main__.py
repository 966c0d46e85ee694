"""`kvd`, also as `python -m kvd`."""

import sys


def main() -> None:
    """Entry point of the `kvd` program."""
    try:
        from kvd.cli import cli  # noqa: PLC0415  # an engine's environment may lack the extra
    except ModuleNotFoundError as error:
        sys.exit(f"kvd: {error}; install the daemon with: pip install 'kvd-offload[daemon]'")
    cli.main()


if __name__ == "__main__":
    main()
