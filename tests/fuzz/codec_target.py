"""Every frame of a script through the codec, in this process."""

from kvd_proto.codec import WIRE
from kvd_proto.errors import DecodeError
from tests.fuzz.script import Script
from tests.fuzz.target import Finding


class CodecTarget:
    """A frame is refused with a DecodeError, or is a message that survives a round trip."""

    name = "codec"

    def play(self, script: Script) -> None:
        """See Target."""
        for step in script:
            for part in step.parts:
                _check(part)


def _check(frame: bytes) -> None:
    try:
        header, message = WIRE.decode(frame)
    except DecodeError as error:
        if not str(error):
            raise Finding(f"{type(error).__name__} says nothing") from error
        return
    except Exception as error:
        raise Finding(f"decoding raises {error!r}") from error
    again = WIRE.encode(message, header.request_id, header.boot_id, header.session)
    if repr(WIRE.decode(again)) != repr((header, message)):  # repr: NaN is not equal to itself
        raise Finding(f"{message!r} does not survive a round trip")
