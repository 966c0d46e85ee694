"""Write what follows from the settings: the table in docs/configuration.md, deploy/kvd.toml.

Run `make docs` after a change there. A test compares the files with what this
module would write.
"""

from pathlib import Path

from kvd.config.render import sample, table

_ROOT = Path(__file__).parents[1]
PAGE = _ROOT / "docs" / "configuration.md"
SAMPLE = _ROOT / "deploy" / "kvd.toml"
BEGIN = "<!-- generated from here by docs/generate_configuration.py -->\n"
END = "<!-- to here -->\n"


def page(old: str) -> str:
    """The page with its table renewed."""
    head, _, rest = old.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


def main() -> None:
    """Rewrite both files."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    SAMPLE.write_text(sample(), encoding="utf-8")


if __name__ == "__main__":
    main()
