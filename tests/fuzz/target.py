"""What scripts are played against: each target takes one and raises `Finding` if it minds."""

from typing import Protocol

from tests.fuzz.script import Script


class Finding(Exception):
    """A script has shown a fault: a crash, or a leak where `leak` is set."""

    def __init__(self, text: str, *, leak: bool = False) -> None:
        super().__init__(text)
        self.leak = leak


class Target(Protocol):
    """One of the codec, the broker's decisions, a live daemon."""

    name: str

    def play(self, script: Script) -> None:
        """Play it.

        Raises:
            Finding: what is wrong.
        """


def inputs_of(script: Script) -> int:
    """How many frames a script sends, counted as inputs."""
    return sum(1 for step in script if step.parts)


def shorter(script: Script, target: Target, tries: int) -> Script:
    """The script without the steps that its finding does not need; `tries` plays at most."""
    size = max(1, len(script) // 2)
    while tries and script:
        place = 0
        while place < len(script) and tries:
            less = script[:place] + script[place + size :]
            tries -= 1
            try:
                target.play(less)
            except Finding:
                script = less
            else:
                place += size
        if size == 1:
            break
        size = max(1, size // 2)
    return script
