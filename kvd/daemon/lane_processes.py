"""Lane processes: start, read, write, restart, end."""

import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq

from kvd.broker.broker import Broker
from kvd.broker.effects import Effect, FdName, ToLane
from kvd.config.settings import Settings
from kvd.daemon.child import ChildProcess
from kvd.daemon.memory import PoolMemory
from kvd.errors import BadDatagram, ChannelFull
from kvd.wire.link import LINK, Imported, ImportWorker, LaneReady, lane_socket
from kvd.wire.seqpacket import Channel, close_all
from kvd_proto.errors import DecodeError

log = logging.getLogger("kvd.daemon")


class LaneProcess(ChildProcess):
    """The process of one device's lane, restarted under a new incarnation when it ends.

    Restarts follow at once after a lane that had served; one that dies before
    it is ready is given growing pauses.

    Args:
        device: what it serves.
        runtime_dir: where its socket goes.
        incarnations: numbers that no lane of this daemon has had yet.
        settings: of the daemon, for the lane's limits.

    Attributes:
        lifeline: a descriptor that reads end of file once nothing of the lane moves bytes.
    """

    def __init__(
        self, device: str, runtime_dir: Path, incarnations: Iterator[int], settings: Settings
    ) -> None:
        super().__init__("kvd.lane")
        self.device = device
        self.incarnation = 0
        self._incarnations = incarnations
        self.channel: Channel | None = None
        self.lifeline = -1
        self._runtime_dir = runtime_dir
        self._limits = [
            *("--max-queued-jobs", str(settings.max_queued_jobs)),
            *("--max-queued-bytes", str(settings.queued_bytes)),
        ]

    def start(self, pool_fd: int, pool_bytes: int) -> None:
        """Start the next incarnation.

        Raises:
            OSError: no process or descriptor is to be had now.
        """
        self.incarnation = next(self._incarnations)
        arguments = ["--device", self.device, "--incarnation", str(self.incarnation)]
        arguments += ["--runtime-dir", str(self._runtime_dir), *self._limits]
        arguments += ["--pool-fd", str(pool_fd), "--pool-bytes", str(pool_bytes)]
        self.channel = self.spawn_linked(lambda fd: [*arguments, "--link-fd", str(fd)], [pool_fd])

    def reap(self, now: float) -> str:
        """Reap the ended process and set when the next may start; return why it ended."""
        if not self.running:
            return ""
        reason = super().reap(now)
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1
        socket_path = self._runtime_dir / lane_socket(self.device, self.incarnation)
        with contextlib.suppress(FileNotFoundError):
            socket_path.unlink()
        return reason

    def __repr__(self) -> str:
        state = f"pid {self._process.pid}" if self._process else "not running"
        return f"<LaneProcess {self.device}#{self.incarnation} {state}>"


class Lanes:
    """One process for each device that is to be served, by device in `processes`.

    Args:
        runtime_dir: where their sockets go.
        core: is told of what they send, and of their ends.
        poller: where their descriptors are registered.
        carry_out: does what the core wants done.
    """

    def __init__(
        self,
        runtime_dir: Path,
        core: Broker,
        poller: zmq.Poller,
        carry_out: Callable[[list[Effect]], None],
    ) -> None:
        self._runtime_dir = runtime_dir
        self._core = core
        self._poller = poller
        self._carry_out = carry_out
        self._incarnations = itertools.count(1)
        self.processes: dict[str, LaneProcess] = {}

    @property
    def running(self) -> bool:
        """Whether a process has not been reaped."""
        return any(process.running for process in self.processes.values())

    def add(self, device: str) -> None:
        """Serve a device."""
        self.processes[device] = LaneProcess(
            device, self._runtime_dir, self._incarnations, self._core.state.settings
        )

    def start_due(self, pool: PoolMemory, now: float) -> None:
        """Start every process that does not run and whose pause is over."""
        for process in self.processes.values():
            if process.running or now < process.start_at:
                continue
            try:
                process.start(pool.fd, pool.nbytes)
            except OSError as error:
                text, lane = "lane %s cannot be started: %s", {"lane": process.device}
                log.error(text, process.device, error, extra=lane)  # noqa: TRY400  # the text has the reason
                process.put_off(now)
                continue
            if process.channel is not None:
                self._poller.register(process.channel.fileno(), zmq.POLLIN)
            self._poller.register(process.pidfd, zmq.POLLIN)

    def turn(self, ready: dict[object, int], now: float) -> None:
        """Read what lanes have sent, and notice those that have ended."""
        for process in list(self.processes.values()):
            self._read(process, ready, now)

    def _read(self, process: LaneProcess, ready: dict[object, int], now: float) -> None:
        channel = process.channel
        if channel is None:
            return
        if channel.wants_write:
            with contextlib.suppress(EOFError):  # what it sent before is read, and its end
                channel.flush()
        if channel.fileno() in ready:
            try:
                while (received := channel.recv()) is not None:
                    self._message(process, *received, now)
            except EOFError:
                self._poller.unregister(channel.fileno())
                process.kill()
        if process.pidfd in ready:
            for fd in (process.pidfd, channel.fileno()):
                with contextlib.suppress(KeyError):
                    self._poller.unregister(fd)
            reason = process.reap(now)
            if not self._core.state.stopping:
                self._carry_out(self._core.supervision.lost(process.device, reason))

    def _message(
        self, process: LaneProcess, frame: bytes, fds: tuple[int, ...], now: float
    ) -> None:
        try:
            _, message = LINK.decode(frame)
        except DecodeError:
            lane = {"lane": process.device}
            log.exception("lane %s sent what is no message", process.device, extra=lane)
            process.kill()
            return
        if isinstance(message, LaneReady) and fds:
            process.lifeline, fds = fds[0], fds[1:]
            process.served = True
        close_all(fds)
        self._carry_out(self._core.supervision.received(process.device, message, now))

    def send(self, effect: ToLane, resolve: Callable[[FdName | None], list[int]]) -> None:
        """Write to a lane, with the descriptors that are named; one that does not read is killed.

        Args:
            effect: what to send to whom.
            resolve: the descriptors of a name.
        """
        process = self.processes[effect.device]
        if process.channel is None:
            return
        try:
            process.channel.send(LINK.encode(effect.message), resolve(effect.fd))
        except BadDatagram as error:
            if not isinstance(effect.message, ImportWorker):
                raise
            text = f"the layout is too large to hand to the lane: {error}"
            order = effect.message
            refusal = Imported(session=order.session, error=text, attempt=order.attempt)
            self._carry_out(
                self._core.supervision.received(effect.device, refusal, time.monotonic())
            )
        except (ChannelFull, EOFError, OSError) as error:
            lane = {"lane": effect.device}
            log.error("lane %s does not read (%s)", effect.device, error, extra=lane)  # noqa: TRY400  # the text has the reason
            process.kill()

    def close(self) -> None:
        """End all without asking."""
        for process in self.processes.values():
            process.kill()
            process.reap(time.monotonic())

    def __repr__(self) -> str:
        return f"<Lanes {list(self.processes.values())}>"
