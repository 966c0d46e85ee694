"""What scripts are played against: a function that takes one and raises `Finding` on a fault."""

from collections.abc import Callable

from kvd_proto.codec import WIRE
from kvd_proto.errors import DecodeError
from tests.fuzz.script import Script

Play = Callable[[Script], None]


class Finding(Exception):
    """A script has shown a fault: a crash, or a leak where `leak` is set."""

    def __init__(self, text: str, *, leak: bool = False) -> None:
        super().__init__(text)
        self.leak = leak


def play_codec(script: Script) -> None:
    """A frame is refused with a DecodeError, or is a message that survives a round trip."""
    for frame in (step.frame for step in script if step.frame):
        try:
            header, message = WIRE.decode(frame)
        except DecodeError as error:
            if not str(error):
                raise Finding(f"{type(error).__name__} has no text") from error
            continue
        except Exception as error:
            raise Finding(f"decoding raises {error!r}") from error
        again = WIRE.encode(message, header.request_id)
        # repr: NaN is not equal to itself
        if repr(WIRE.decode(again)) != repr((header, message)):
            raise Finding(f"{message!r} does not survive a round trip")


def shorter(script: Script, play: Play, tries: int) -> Script:
    """Return the script without the steps that its finding does not need; `tries` plays at most."""
    size = max(1, len(script) // 2)
    while tries and script:
        place = 0
        while place < len(script) and tries:
            less = script[:place] + script[place + size :]
            tries -= 1
            try:
                play(less)
            except Finding:
                script = less
            else:
                place += size
        if size == 1:
            break
        size = max(1, size // 2)
    return script
