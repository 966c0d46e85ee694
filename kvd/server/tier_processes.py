"""The processes of tiers: start, read, write, restart, end.

The broker never waits for one. One that does not read its orders is killed; one that has been
killed and does not die, because its medium hangs, is left alone: the next is started when it has.
"""

import logging
import select
import time
from collections.abc import Callable, Sequence

from kvd.broker.broker import Broker
from kvd.broker.effects import Effect, ToTier
from kvd.broker.tiers.tier import Tier
from kvd.server.child import ChildProcess
from kvd.server.memory import PoolMemory
from kvd.wire.tiering import TIERING, BeginTier, TierReady
from kvd_proto.channel import close_all
from kvd_proto.errors import BadFrame, DecodeError

log = logging.getLogger("kvd.daemon")
_PAUSE_SECONDS = 0.25
_END_SECONDS = 2.0
_MESSAGES_A_TURN = 64
_TURN_SECONDS = 0.002  # of one tier's messages: those of a scan have a thousand keys each


class TierProcesses:
    """One process for each tier, in order.

    Args:
        core: is told of messages, and of each process's beginning and end.
        poller: where links and ends are registered.
        carry_out: carries effects out.
    """

    def __init__(
        self, core: Broker, poller: select.epoll, carry_out: Callable[[list[Effect]], None]
    ) -> None:
        self._core = core
        self._carry_out = carry_out
        self._children = [self._child(tier, poller) for tier in core.state.tiers]

    @staticmethod
    def _child(tier: Tier, poller: select.epoll) -> ChildProcess:
        child = ChildProcess("kvd.tier", f"tier {tier.name}", poller, _PAUSE_SECONDS)
        child.fields = {"tier": tier.name}
        return child

    def patience(self, now: float) -> float:
        """Seconds until something is due, as far as nothing arrives."""
        unread = any(child.unread for child in self._children)
        return 0.0 if unread else self._core.tiering.due(now)

    def start_due(self, pool: PoolMemory, now: float) -> None:
        """Start every process that does not run and whose pause is over."""
        settings = self._core.state.settings
        for index, child in enumerate(self._children):
            if child.running or now < child.start_at or not child.spawn([], now):
                continue
            self._core.tiering.begun(index, child.pid, now)
            begin = BeginTier(
                index=index,
                setting=self._core.state.tiers[index].setting.text,
                pool_bytes=pool.nbytes,
                log_level=settings.log_level,
                log_style=settings.log_format,
            )
            child.send(TIERING.encode(begin), [pool.fd])

    def turn(self, ready: dict[int, int], now: float) -> None:
        """Read what tiers have sent, notice those that have ended, do what is due."""
        for index, child in enumerate(self._children):
            child.flush()
            if child.unread or (child.link is not None and child.link.fileno() in ready):
                self._receive(index, child, now)
            if child.pidfd in ready:
                reason = child.reap(now)
                if not self._core.state.stopping:
                    self._carry_out(self._core.tiering.lost(index, reason, now))
        self._carry_out(self._core.tiering.turn(now))

    def _receive(self, index: int, child: ChildProcess, now: float) -> None:
        """Take in some of what has come; more of it in the next turn of the loop."""
        end = time.monotonic() + _TURN_SECONDS
        try:
            for number, (frame, fds) in enumerate(child.receive(), 1):
                close_all(fds)
                _, message = TIERING.decode(frame)
                child.served |= isinstance(message, TierReady)
                self._carry_out(self._core.tiering.received(index, message, now))
                if number == _MESSAGES_A_TURN or time.monotonic() >= end:
                    return
        except EOFError:
            child.close_link()
        except (DecodeError, BadFrame) as error:
            child.kill(f"sent what is no message: {error}")

    def send(self, effect: ToTier, fds: Sequence[int]) -> None:
        """Write to a tier."""
        self._children[effect.tier].send(TIERING.encode(effect.message), fds)

    def kill(self, index: int, why: str, *, wrong: bool) -> None:
        """End a process without asking; after one that was wrong the next comes later each time."""
        self._children[index].served &= not wrong
        self._children[index].kill(why)

    def close(self) -> None:
        """End all, those that were told to stop after a moment, and wait for none that hangs."""
        self._wait()
        for child in self._children:
            child.close_link()
            child.kill()
        for child in self._wait():
            log.error(
                "%s, pid %d, does not end: its medium hangs; the next daemon starts when it has"
                " ended", child.name, child.pid, extra=child.fields,
            )  # fmt: skip

    def _wait(self) -> list[ChildProcess]:
        """Reap those that end within a moment; return the others."""
        end = time.monotonic() + _END_SECONDS
        left = [child for child in self._children if child.running]
        while left and (rest := end - time.monotonic()) > 0:
            poll = select.poll()
            for child in left:
                poll.register(child.pidfd, select.POLLIN)
            ended = dict(poll.poll(rest * 1000))
            for child in [each for each in left if each.pidfd in ended]:
                child.reap(0.0)
                left.remove(child)
        return left

    def __repr__(self) -> str:
        return f"<TierProcesses {self._children}>"
