"""The image, its probe and the compose files; with an engine see docker/check.sh."""

import re
import subprocess
import sys
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvd.config.settings import SETTINGS, Settings
from kvd.config.values import parse_tiers
from kvd.tier.contract import check_tiers
from tests.conftest import Daemon
from tests.daemon.serving import run_kvd
from tests.deploy.places import ROOT, run, stop_seconds
from tests.waiting import eventually

DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
COMPOSE = (DOCKER / "compose.yaml").read_text()


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    """The services of the compose file."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE)
    return found["services"]


@pytest.mark.parametrize("name", ["Dockerfile", "vllm.Dockerfile", "mooncake.Dockerfile"])
def test_hadolint_accepts_the_dockerfiles(name: str) -> None:
    """No rule of hadolint is broken, and none is switched off."""
    hadolint = str(Path(sys.executable).parent / "hadolint")
    done = run(hadolint, "--no-color", str(DOCKER / name))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "hadolint ignore" not in (DOCKER / name).read_text()


def test_the_compose_files_follow_the_schema(tmp_path: Path) -> None:
    """The schema of the Compose specification accepts them, and would see a mistake."""
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    good = run(*check, str(DOCKER / "compose.yaml"), str(DOCKER / "compose.mooncake.yaml"))
    assert good.returncode == 0, good.stdout
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((DOCKER / "compose.yaml").read_text().replace("shm_size:", "shmsize:"))
    assert run(*check, str(wrong)).returncode == 1


def test_no_service_is_privileged(services: dict[str, dict[str, Any]]) -> None:
    """No service gets more than it needs, and nothing of the host's is shared."""
    for name, service in services.items():
        assert "privileged" not in service, name
        assert "ipc" not in service, name
        assert "network_mode" not in service or service["network_mode"] == "none", name
        assert "cap_add" not in service, name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name
    for name in ("kvd", "pids"):
        assert services[name]["cap_drop"] == ["ALL"]
        assert services[name]["read_only"] is True
        assert services[name]["security_opt"] == ["no-new-privileges:true"]


def test_a_large_pool_fits(services: dict[str, dict[str, Any]]) -> None:
    """The default of shm_size is above that of the pool, and a stop has time to unpin it."""
    kvd = services["kvd"]
    (pool,) = re.findall(r":-(\d+)GiB", kvd["environment"]["KVD_CPU_BYTES"])
    (room,) = re.findall(r":-(\d+)gb", kvd["shm_size"])
    assert int(room) > int(pool)
    grace = int(kvd["stop_grace_period"].removesuffix("s"))
    assert grace >= stop_seconds(int(pool))
    told = re.findall(r"(\d+) s\s+(?:# )?here, (\d+) s for 1 TiB", COMPOSE)
    assert told == [(str(ceil(stop_seconds(int(pool)))), str(ceil(stop_seconds(1024))))]


def test_a_mooncake_cluster_is_closed_to_others() -> None:
    """Its network leads nowhere else, nothing is published, and kvd is told where the master is."""
    text = (DOCKER / "compose.mooncake.yaml").read_text()
    found = yaml.safe_load(text)
    assert found["networks"] == {"mooncake": {"internal": True}}
    services = found["services"]
    for name, service in services.items():
        assert service["networks"] == ["mooncake"], name
        assert "ports" not in service, name
        assert name == "kvd" or service["cap_drop"] == ["ALL"]
        assert name == "kvd" or service["read_only"] is True
    (setting,) = re.findall(r"KVD_TIER: \$\{KVD_TIER:-(.+)\}", text)
    (tier,) = parse_tiers([setting])
    check_tiers([tier])
    host, _, port = tier.options["master"].partition(":")
    assert f"--rpc_port={port}" in services[host]["command"]
    assert f"--master_server_address={host}:{port}" in services["mooncake-store"]["command"]
    assert "KVD_TIER" in {known.variable for known in SETTINGS.values()}


def test_the_user_of_the_image_is_one_number_everywhere(
    services: dict[str, dict[str, Any]],
) -> None:
    """User and group by number, as Kubernetes wants it, and the engine's group is that one."""
    (user, group) = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)[0]
    assert f"--gid {group} kvd" in DOCKERFILE
    assert f"--uid {user} " in DOCKERFILE
    assert services["vllm"]["group_add"] == [group]
    runtime_dir = Settings().runtime_dir
    assert f"runtime:{runtime_dir}:ro" in services["vllm"]["volumes"]
    assert "KVD_RUNTIME_DIR=" + runtime_dir in DOCKERFILE


def probe(runtime_dir: Path, *path: str) -> subprocess.CompletedProcess[str]:
    """Run it as a container's engine would."""
    command = (sys.executable, "-m", "kvd.report.probe", *path)
    return run(*command, KVD_RUNTIME_DIR=str(runtime_dir))


def test_probes_follow_readiness_and_life(daemon: Daemon) -> None:
    """Ready: both pass, /readyz by default. Drained: that fails with the reason, /livez passes."""

    def passes(*path: str) -> None:  # HTTP may not have started yet
        done = eventually(lambda: probe(daemon.runtime_dir, *path), lambda it: not it.returncode)
        assert (done.stdout, done.stderr) == ("ok\n", "")

    passes()
    passes("/livez")
    assert run_kvd("drain", "--runtime-dir", str(daemon.runtime_dir)).returncode == 0
    done = eventually(lambda: probe(daemon.runtime_dir), lambda done: "drain" in done.stdout)
    assert done.returncode == 1
    passes("/livez")


def test_no_daemon_fails_with_a_hint(tmp_path: Path) -> None:
    """Nobody at the socket: exit status 1, and the path."""
    done = probe(tmp_path)
    assert done.returncode == 1
    assert f"{tmp_path}/http.sock" in done.stderr
