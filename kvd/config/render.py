"""Settings as text: TOML that can be used, the commented sample file, the table of the docs."""

import json
from typing import Any

from kvd.config.about import About
from kvd.config.settings import KNOWN
from kvd.config.sources import Loaded

_HEAD = """\
# kvd's settings. Copy it to /etc/kvd/kvd.toml and remove the # where a value is to change;
# what is shown is the default. Each can also be given as KVD_<KEY> in the environment or as a
# flag of `kvd serve`; the flag wins over the environment, and the environment over this file.
# Check an edited file with `kvd config check FILE`. Sizes are text such as "64GiB" or bytes.
"""


def toml_value(value: Any) -> str:
    """Return a value in TOML."""
    if isinstance(value, str):
        # TOML's basic strings are JSON's, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        parts = [f"{toml_value(key)} = {toml_value(item)}" for key, item in value.items()]
        return f"{{{', '.join(parts)}}}"
    return json.dumps(value)


def as_json(loaded: Loaded) -> dict[str, Any]:
    """Return the effective settings by key, with what waits for a restart."""
    settings: dict[str, dict[str, Any]] = {
        key: {
            "value": getattr(loaded.settings, key),
            "from": origin,
            "changes_live": KNOWN[key].live,
        }
        for key, origin in loaded.origins.items()
    }
    for key, (value, origin) in loaded.waiting.items():
        settings[key]["after_restart"] = {"value": value, "from": origin}
    return {"file": str(loaded.file) if loaded.file else None, "settings": settings}


def as_toml(settings: dict[str, dict[str, Any]]) -> str:
    """Return the settings of `as_json` as a file, with each one's origin in a comment."""
    lines = []
    for key, entry in settings.items():
        origin = entry["from"].encode("unicode_escape").decode()  # a comment is one line
        lines.append(f"{key} = {toml_value(entry['value'])}  # {origin}")
    return "\n".join(lines) + "\n"


def sample() -> str:
    """Return the text of deploy/kvd.toml."""
    lines, section = [_HEAD], ""
    for known in KNOWN.values():
        if known.section != section:
            section = known.section
            lines.append(f"# ---- {section}\n")
        lines += [f"# {known.help}", f"# {_needs(known)}"]
        lines.append(f"#{known.key} = {toml_value(known.default)}\n")
    return "\n".join(lines).rstrip() + "\n"


def table() -> str:
    """Return the table in docs/configuration.md."""
    lines = ["| key | default | meaning | a value is | changes live |", "|---|---|---|---|---|"]
    for known in KNOWN.values():
        live = "yes" if known.live else "no"
        lines.append(
            f"| `{known.key}` | `{toml_value(known.default)}` | {known.help} |"
            f" {known.needs} | {live} |"
        )
    return "\n".join(lines) + "\n"


def _needs(known: About) -> str:
    text = known.needs[0].upper() + known.needs[1:]
    return f"{text}.{' Changes live.' if known.live else ''}"
