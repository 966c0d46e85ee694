"""Lane processes: start, read, write, restart, end."""

import itertools
import os
import select
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvd.broker.broker import Broker
from kvd.broker.effects import Effect
from kvd.machine.files import open_files_remedy
from kvd.server.lane_process import LaneProcess
from kvd.server.memory import PoolMemory
from kvd.wire.link import LINK, BeginLane, LaneReady, StopLane, lane_socket
from kvd_proto.channel import close_all
from kvd_proto.errors import BadFrame, DecodeError, DescriptorsLost
from kvd_proto.messages import Message


class Lanes:
    """One process for each device that is to be served, by device in `processes`.

    A process may have been started before there is a pool; what it is to do it is told when there
    is one. Each that is told is another incarnation: a number that no lane of this daemon has had
    yet.

    Args:
        started: those that there are.
    """

    def __init__(
        self,
        runtime_dir: Path,
        core: Broker,
        poller: select.epoll,
        carry_out: Callable[[list[Effect]], None],
        started: Iterable[LaneProcess] = (),
    ) -> None:
        self._runtime_dir = runtime_dir
        self._core = core
        self._poller = poller
        self._carry_out = carry_out
        self._incarnations = itertools.count(1)
        self._pin_lock = os.memfd_create("kvd-pin-lock", os.MFD_CLOEXEC)
        self.processes = {process.device: process for process in started}

    @property
    def running(self) -> bool:
        """Whether a process has not been reaped."""
        return any(process.running for process in self.processes.values())

    def add(self, device: str) -> None:
        """Serve a device."""
        self.processes[device] = LaneProcess(device, self._poller)

    def start_due(self, pool: PoolMemory, now: float) -> None:
        """Start every process that does not run and whose pause is over; say what it serves."""
        for process in self.processes.values():
            if not process.running and now >= process.start_at:
                process.spawn([], now)
            if process.running and process.socket is None:
                self._begin(process, pool)

    def _begin(self, process: LaneProcess, pool: PoolMemory) -> None:
        number, settings = next(self._incarnations), self._core.state.settings
        process.socket = self._runtime_dir / lane_socket(
            process.device, number, self._core.state.boot_id
        )
        begin = BeginLane(
            device=process.device,
            incarnation=number,
            endpoint=f"ipc://{process.socket}",
            pool_bytes=pool.nbytes,
            max_queued_jobs=settings.max_queued_jobs,
            max_queued_bytes=settings.queued_bytes,
            log_level=settings.log_level,
            log_style=settings.log_format,
        )
        self.send(process.device, begin, [pool.fd, self._pin_lock])

    def turn(self, ready: dict[int, int], now: float) -> None:
        """Read what lanes have sent, and notice those that have ended."""
        for process in list(self.processes.values()):
            process.flush()
            if process.link is not None and process.link.fileno() in ready:
                self._receive(process, now)
            if process.pidfd in ready:
                reason = process.reap(now)
                self._carry_out(self._core.supervision.lost(process.device, reason))

    def _receive(self, process: LaneProcess, now: float) -> None:
        try:
            for frame, fds in process.receive():
                _, message = LINK.decode(frame)
                if isinstance(message, LaneReady) and fds:
                    process.lifeline, process.served = fds[0], True
                    close_all(fds[1:])
                else:
                    close_all(fds)
                self._carry_out(self._core.supervision.received(process.device, message, now))
        except EOFError:
            process.close_link()
        except (DecodeError, BadFrame) as error:
            process.kill(f"sent what is no message: {error}")
        except DescriptorsLost as error:  # of LaneReady, which brings the lifeline
            why = f"{error}; {open_files_remedy()}"
            process.kill(f"the broker could not receive its lifeline: {why}")

    def send(self, device: str, message: Message, fds: Sequence[int]) -> None:
        """Send an order to a lane; one that does not read is killed."""
        process = self.processes[device]
        if process.socket is not None:
            process.send(LINK.encode(message), fds)
        elif isinstance(message, StopLane):
            process.kill()

    def close(self) -> None:
        """End all without asking."""
        for process in self.processes.values():
            process.kill()
            process.reap(time.monotonic())
        os.close(self._pin_lock)

    def __repr__(self) -> str:
        return f"<Lanes {list(self.processes.values())}>"
