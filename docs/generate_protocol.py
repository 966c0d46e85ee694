"""Write the generated part of docs/protocol.md: messages, state tables, test vectors.

Everything below the marker line comes from kvd_proto; run `make docs` after a
change there. A test compares the file with what this module would write.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import msgspec

from kvd_proto.messages import REPLY_OF, TAGS, ErrorCode, JobStatus
from kvd_proto.states import CHUNK, JOB, SESSION
from kvd_proto.vectors import EXAMPLES, vector

FILE = Path(__file__).parent / "protocol.md"
MARKER = "<!-- generated below this line by docs/generate_protocol.py -->"


def _first_line(text: str | None) -> str:
    return (text or "").strip().splitlines()[0]


def _messages() -> list[str]:
    lines = [
        "## Messages",
        "",
        "| tag | message | fields | reply | meaning |",
        "|---|---|---|---|---|",
    ]
    for tag, kind in TAGS.items():
        fields = ", ".join(f"`{field.encode_name}`" for field in msgspec.structs.fields(kind))
        reply = REPLY_OF[kind].__name__ if kind in REPLY_OF else ""
        lines.append(
            f"| 0x{tag:02X} | {kind.__name__} | {fields} | {reply} | {_first_line(kind.__doc__)} |"
        )
    return lines


def _codes(title: str, codes: type[StrEnum]) -> list[str]:
    return [f"## {title}", "", *(f"- `{code.value}`" for code in codes)]


def _diagram(title: str, table: Mapping[StrEnum, Mapping[StrEnum, StrEnum]]) -> list[str]:
    lines = [f"### {title}", "", "```mermaid", "stateDiagram-v2"]
    lines.append(f"    [*] --> {next(iter(table))}")
    for state, arrows in table.items():
        lines += [f"    {state} --> {target}: {event}" for event, target in arrows.items()]
        if not arrows:
            lines.append(f"    {state} --> [*]")
    return [*lines, "```", ""]


def _vectors() -> list[str]:
    lines = ["## Test vectors", "", "Request id 7; hex of the whole frame.", ""]
    for example in EXAMPLES:
        lines += [f"**{type(example).__name__}**", "", "```", vector(example).hex(), "```", ""]
    return lines


def generated() -> str:
    """The part below the marker."""
    parts = [
        _messages(),
        _codes("Error codes", ErrorCode),
        _codes("Job statuses", JobStatus),
        ["## Life cycles"],
        _diagram("Session", SESSION),  # type: ignore[arg-type]  # StrEnum subclasses are invariant
        _diagram("Job, in its lane", JOB),  # type: ignore[arg-type]
        _diagram("Slot of a chunk", CHUNK),  # type: ignore[arg-type]
        _vectors(),
    ]
    return "\n\n".join("\n".join(part).rstrip() for part in parts) + "\n"


def main() -> None:
    """Rewrite the file below its marker."""
    head = FILE.read_text(encoding="utf-8").split(MARKER)[0]
    FILE.write_text(f"{head}{MARKER}\n\n{generated()}", encoding="utf-8")


if __name__ == "__main__":
    main()
