"""What an earlier process has left in the directory: slabs are opened, damaged ones set aside."""

import errno
import logging
import time

from kvd.tier.disk import slabs
from kvd.tier.disk.home import Home
from kvd.tier.disk.namespaces import Namespaces
from kvd.tier.disk.rebuild import rebuild
from kvd.tier.disk.slabs import Slab
from kvd.tier.disk.space import Space, split
from kvd_proto.sizes import format_size

_log = logging.getLogger(__name__)


def load(home: Home, namespaces: Namespaces, flags: int) -> tuple[Space, int]:
    """Open all slabs and find the chunks in them; records that do not count are erased.

    Args:
        home: the directory.
        namespaces: whose chunks count.
        flags: more flags to open slots' files with: O_DIRECT or 0.

    Returns:
        The slots; and how many records were damaged.

    Raises:
        OSError: of the medium.
    """
    started = time.monotonic()
    loaded = [_load_slab(home, number, flags) for number in home.slabs()]
    found = [slab for slab in loaded if slab is not None]
    held, wrong, damaged = rebuild(found, namespaces.by_number())
    space = Space(found, held)
    for place in wrong:
        number, slot = split(place)
        space.slabs[number].erase_records(slot)
    chunks, nbytes = space.used()
    _log.info(
        "disk:%s: %d chunks in %s found in %.2f s, %d records dropped",
        home.path,
        chunks,
        format_size(nbytes),
        time.monotonic() - started,
        len(wrong),
    )
    if damaged:
        _log.warning(
            "disk:%s: damaged records in its index: %d; their chunks are dropped. A power loss may"
            " leave a few; else look at the disk (smartctl -a) and at what writes to the files",
            home.path,
            damaged,
        )
    return space, damaged


def _load_slab(home: Home, number: int, flags: int) -> Slab | None:
    name = f"{home.path}/{number:06}"
    try:
        return slabs.load(home.fd, number, flags)
    except FileNotFoundError:  # one file is there: of a start, an end or somebody else's hand
        slabs.remove(home.fd, number)
        _log.info("disk: %s.slab or its index is missing: what is left was removed", name)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EIO, errno.ELOOP):
            raise
        slabs.set_aside(home.fd, number)
        _log.error(
            "disk: %s.slab is damaged (%s): it and its index were renamed to .damaged, count"
            " against the tier's size, and may be removed",
            name,
            error,
        )
    return None
