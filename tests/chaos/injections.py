"""The table of what can be injected. To add a kind: one function, one line in `INJECTIONS`.

A function gets the world and the planned action, does its harm, and returns how to undo it,
which is called after `action.hold` seconds, or raises `Skip` where it cannot be done here.
"""

import contextlib
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.children import Client
from tests.chaos.clock import JUMPS
from tests.chaos.daemons import CHANGES
from tests.chaos.plan import Action
from tests.chaos.shared import Count
from tests.chaos.world import World

Undo = Callable[[], None]
Inject = Callable[[World, Action], Undo]


class Skip(Exception):
    """This cannot be injected here; the text says why."""


@dataclass(frozen=True, slots=True)
class Injection:
    """One kind: what does it, and how often it comes relative to the others."""

    inject: Inject
    weight: float


def _nothing() -> None:
    """There is nothing to undo that the end of the step does not."""


# ------------------------------------------------------------ kill and freeze


def _kill_broker(world: World, action: Action) -> Undo:
    del action
    world.daemon.end(signal.SIGKILL)

    def again() -> None:  # unless an injection that overlapped has started the next one
        if not world.daemon.running:
            world.daemon.start()

    return again


def _stop_broker(world: World, action: Action) -> Undo:
    del action
    return _freeze(world, world.daemon.pid)


def _kill_lane(world: World, action: Action) -> Undo:
    _signal_pid(action.pick(_lanes(world)), signal.SIGKILL)
    return _nothing


def _stop_lane(world: World, action: Action) -> Undo:
    return _freeze(world, action.pick(_lanes(world)))


def _kill_client(clients: Callable[[World], list[Client]]) -> Inject:
    def inject(world: World, action: Action) -> Undo:
        client = action.pick(clients(world))
        client.kill()

        def again() -> None:
            if not client.running:
                client.start()

        return again

    return inject


def _stop_client(clients: Callable[[World], list[Client]]) -> Inject:
    def inject(world: World, action: Action) -> Undo:
        return _freeze(world, action.pick(clients(world)).pid)

    return inject


def _lanes(world: World) -> list[int]:
    lanes = world.daemon.lane_pids() if world.daemon.running else []
    if not lanes:
        raise Skip("no lane ran at that moment")
    return lanes


def _freeze(world: World, pid: int) -> Undo:
    world.freezer.stop(pid)
    return lambda: world.thaw(pid)


def _signal_pid(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
        os.kill(pid, number)


# ------------------------------------------------------------------- restarts


def _restart(number: int) -> Inject:
    """With another configuration, by this signal."""

    def inject(world: World, action: Action) -> Undo:
        if number != signal.SIGKILL:
            world.thaw(world.daemon.pid)  # a frozen broker gets no other signal
        complaint = world.daemon.end(number)
        if complaint:
            world.violated(complaint)
        change = action.pick(CHANGES)
        return lambda: None if world.daemon.running else world.daemon.start(change)

    return inject


# ------------------------------------------------------------ nothing is left


def _starve(pids: Callable[[World], list[int]]) -> Inject:
    """A process may open hardly any descriptor more than it has."""

    def inject(world: World, action: Action) -> Undo:
        pid = action.pick(pids(world))
        more = 1 + int(action.draws[1] * 20)
        with contextlib.suppress(OSError):
            _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            count = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(most, count + more), most))

        def undo() -> None:  # lanes that were started meanwhile have inherited it
            for each in {pid, world.daemon.pid, *world.daemon.lane_pids()}:
                with contextlib.suppress(OSError):
                    _, most = resource.prlimit(each, resource.RLIMIT_NOFILE)
                    resource.prlimit(each, resource.RLIMIT_NOFILE, (most, most))

        return undo

    return inject


def _broker(world: World) -> list[int]:
    if not world.daemon.running:
        raise Skip("no broker ran at that moment")
    return [world.daemon.pid]


def _fill_pool_dir(world: World, action: Action) -> Undo:
    """Not a page is left where the pool and the ledgers lie."""
    del action
    if not world.place.own_tmpfs:
        raise Skip("this user may not mount a tmpfs, and nobody else's is filled")
    filler = world.place.pool_dir / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass

    return lambda: filler.unlink(missing_ok=True)


# ----------------------------------------------------------------------- pins


def _pin_everything(world: World, action: Action) -> Undo:
    """Every engine pins what it finds; half of the times it forgets the leases."""
    schedulers = world.schedulers()
    for client in schedulers:
        client.counters[Count.PIN] = 1 + (action.draws[0] < 0.5)

    def undo() -> None:
        for client in schedulers:
            client.counters[Count.PIN] = 0

    return undo


# --------------------------------------------------------------------- clocks


def _jump_clock(world: World, action: Action) -> Undo:
    """Forward or back, by seconds or by decades; then back to where it was."""
    if world.clock.missing:
        raise Skip(world.clock.missing)
    world.clock.jump(action.pick(JUMPS))
    return lambda: world.clock.jump(0)


INJECTIONS: dict[str, Injection] = {
    "kill broker": Injection(_kill_broker, 2),
    "stop broker": Injection(_stop_broker, 2),
    "kill lane": Injection(_kill_lane, 2),
    "stop lane": Injection(_stop_lane, 2),
    "kill worker": Injection(_kill_client(World.ranks), 3),
    "stop worker": Injection(_stop_client(World.ranks), 3),
    "kill scheduler": Injection(_kill_client(World.schedulers), 2),
    "stop scheduler": Injection(_stop_client(World.schedulers), 2),
    "restart with SIGTERM": Injection(_restart(signal.SIGTERM), 1),
    "restart with SIGKILL": Injection(_restart(signal.SIGKILL), 1),
    "starve broker of descriptors": Injection(_starve(_broker), 1.5),
    "starve lane of descriptors": Injection(_starve(_lanes), 1.5),
    "fill pool directory": Injection(_fill_pool_dir, 1.5),
    "jump wall clock": Injection(_jump_clock, 2),
    "pin everything": Injection(_pin_everything, 2),
}
"""Every kind by its name in the report."""
