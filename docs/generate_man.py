"""Write docs/man/kvd.1 from the help of every command.

Run `make docs` after a change there. A test compares the file with what this
module would write.
"""

from pathlib import Path

from kvd.cli import cli
from kvd.cli.manual import man_page

FILE = Path(__file__).parent / "man" / "kvd.1"


def main() -> None:
    """Rewrite the file."""
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(man_page(cli), encoding="utf-8")


if __name__ == "__main__":
    main()
