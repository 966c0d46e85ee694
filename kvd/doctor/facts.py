"""Facts about this machine beside those of a start, without judgement; `checks.py` judges."""

import grp
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvd.doctor.probes import CHILD_SECONDS, Gpus, TierFacts, probe_gpus, probe_tier, run_python
from kvd.doctor.start import StartFacts
from kvd.errors import ConfigError, NotRunning, SocketAccessDenied
from kvd.machine.directories import MANIFEST
from kvd.machine.numa import gpu_nodes
from kvd.wire.tool import ToolConnection
from kvd_proto.messages import ConfigShown, ShowConfig

_ANSWER_SECONDS = 3.0


@dataclass(frozen=True)
class RuntimeFacts:
    """The runtime directory and its daemon.

    status: of the directory; None if it does not exist.
    holder: pid of the process that holds the lock; None if none does.
    report, settings: the daemon's status report, its settings by key; None without an answer.
    failure: why there is no answer; empty if there is one.
    denied: why this user may not connect, with the remedy; empty if it may.
    """

    path: Path
    status: os.stat_result | None
    group_name: str
    holder: int | None = None
    report: dict[str, Any] | None = None
    settings: dict[str, Any] | None = None
    failure: str = ""
    denied: str = ""


class Facts(StartFacts):
    """All facts; see `StartFacts`. Those of processes and swap may raise psutil.Error."""

    @cached_property
    def cpus(self) -> int:
        """Processors that this process may use."""
        return len(os.sched_getaffinity(0))

    @cached_property
    def child_problem(self) -> str:
        """Why this Python cannot start processes; empty if it can."""
        try:
            _, problem, hung = run_python("-c", "")
        except OSError as error:
            return str(error)
        return f"no answer within {CHILD_SECONDS:g} s" if hung else problem

    @cached_property
    def runtime(self) -> RuntimeFacts:
        """The runtime directory."""
        path, holder = self.runtime_path, self.daemon
        report, settings, failure, denied = None, None, "", ""
        if holder is not None:
            try:
                with ToolConnection(path, timeout=_ANSWER_SECONDS) as control:
                    report = control.status()
                    shown = control.ask(ShowConfig(), ConfigShown).config["settings"]
                    settings = {key: entry["value"] for key, entry in shown.items()}
            except SocketAccessDenied as error:
                denied = str(error)
            except NotRunning as error:
                failure = str(error)
        status = _status(path)
        return RuntimeFacts(
            path=path,
            status=status,
            group_name=_group_name(status.st_gid) if status else "",
            holder=holder,
            report=report,
            settings=settings,
            failure=failure,
            denied=denied,
        )

    @cached_property
    def port_problem(self) -> ConfigError | None:
        """See `StartFacts`; the address of the running daemon is free once that has ended."""
        running = self.runtime.settings or {}
        listen = self.settings.http_listen
        if self.daemon is not None and running.get("http_listen", listen) == listen:
            return None
        return super().port_problem

    @cached_property
    def kept_cpu_bytes(self) -> int | None:
        """`cpu_bytes` of the pool that a daemon has left; None if there is none."""
        try:
            with (self.metadata_directory / MANIFEST).open("rb") as file:
                return int(json.loads(file.read(4096))["cpu_bytes"])
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            return None

    @cached_property
    def swap_used(self) -> int:
        """Bytes in swap."""
        import psutil  # noqa: PLC0415  # reads /proc when imported

        return int(psutil.swap_memory().used)

    @cached_property
    def huge_pages(self) -> dict[str, int]:
        """Fields of /proc/meminfo that start with Huge: numbers of pages, or sizes in bytes."""
        fields = {}
        for line in _read(Path("/proc/meminfo")).splitlines():
            name, _, rest = line.partition(":")
            if name.startswith("Huge") and rest.split():
                number, *unit = rest.split()
                fields[name] = int(number) * (1024 if unit == ["kB"] else 1)
        return fields

    @cached_property
    def nodes(self) -> dict[str, int]:
        """Memory of each NUMA node."""
        nodes = {}
        for node in sorted(Path("/sys/devices/system/node").glob("node[0-9]*")):
            for line in _read(node / "meminfo").splitlines():
                words = line.split()
                if len(words) >= 4 and words[2] == "MemTotal:":
                    nodes[node.name] = int(words[3]) * 1024
        return nodes

    @cached_property
    def gpu_nodes(self) -> tuple[str, ...]:
        """The node of each GPU, in order of bus ids, if the daemon may run there."""
        try:
            allowed = os.sched_getaffinity(self.daemon or 0)
        except OSError:
            allowed = os.sched_getaffinity(0)
        return tuple(f"node{gpu.node.number}" for gpu in gpu_nodes(allowed))

    @cached_property
    def gpus(self) -> Gpus:
        """The GPUs and their driver."""
        return probe_gpus()

    @cached_property
    def others(self) -> dict[int, str]:
        """Command lines of daemons that serve other directories, by pid."""
        import psutil  # noqa: PLC0415  # reads /proc when imported

        commands = {}
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            index = next((i for i, word in enumerate(words[:4]) if Path(word).name == "kvd"), None)
            serves = index is not None and words[index + 1 : index + 2] == ["serve"]
            if serves and process.pid not in (self.daemon, os.getpid()):
                commands[process.pid] = " ".join(words[index:])[:200]
        return commands

    @cached_property
    def tiers(self) -> list[TierFacts]:
        """The configured tiers."""
        return [probe_tier(text) for text in self.settings.tier]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _group_name(gid: int) -> str:
    """Return the group's name, or its number if it has no name here."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
