"""Write what follows from the settings: the table in docs/configuration.md, deploy/kvd.toml.

Run `make docs` after a change there. A test compares the files with what this
module would write.
"""

from pathlib import Path

from kvd.cli.config import toml_value
from kvd.config.settings import SETTINGS, Setting

_ROOT = Path(__file__).parents[1]
PAGE = _ROOT / "docs" / "configuration.md"
SAMPLE = _ROOT / "deploy" / "kvd.toml"
BEGIN = "<!-- generated from here by docs/generate_configuration.py -->\n"
END = "<!-- to here -->\n"
_HEAD = """\
# kvd's settings. Copy it to /etc/kvd/kvd.toml and remove the # where a value is to change;
# what is shown is the default. Each can also be given as KVD_<KEY> in the environment or as a
# flag of `kvd serve`; the flag wins over the environment, and the environment over this file.
# Check an edited file with `kvd config check FILE`. Sizes are text such as "64GiB" or bytes.
"""


def sample() -> str:
    """Return the text of deploy/kvd.toml."""
    lines, section = [_HEAD], ""
    for known in SETTINGS.values():
        if known.section != section:
            section = known.section
            lines.append(f"# ---- {section}\n")
        lines += [f"# {known.help}", f"# {_needs(known)}"]
        lines.append(f"#{known.key} = {toml_value(known.default)}\n")
    return "\n".join(lines).rstrip() + "\n"


def table() -> str:
    """Return the table in docs/configuration.md."""
    lines = ["| key | default | meaning | a value is | changes live |", "|---|---|---|---|---|"]
    for known in SETTINGS.values():
        live = "yes" if known.live else "no"
        lines.append(
            f"| `{known.key}` | `{toml_value(known.default)}` | {known.help} |"
            f" {known.requirement} | {live} |"
        )
    return "\n".join(lines) + "\n"


def _needs(known: Setting) -> str:
    first, _, rest = known.requirement.partition(" ")
    text = f"{first[0].upper()}{first[1:]} {rest}" if first.isalpha() else known.requirement
    return f"{text}.{' Changes live.' if known.live else ''}"


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
