"""The image with its probe, the compose files, and the wheels; docker/check.sh has an engine."""

import json
import re
import subprocess
import sys
import venv
import zipfile
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvd.config.settings import SETTINGS, Settings
from kvd.config.values import parse_tiers
from kvd.tier.contract import tier_problems
from kvd.version import VERSION
from tests.conftest import Daemon
from tests.daemon.serving import run_kvd
from tests.deploy.places import ROOT, run, stop_seconds, tool
from tests.torch_engine import SOURCE_PATH, write_torch_engine
from tests.waiting import eventually

DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
COMPOSE = (DOCKER / "compose.yaml").read_text()
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE)["services"]


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
    good = run(*check, *map(str, sorted(DOCKER.glob("compose*.yaml"))))
    assert good.returncode == 0, good.stdout
    misspelt = tmp_path / "compose.yaml"
    misspelt.write_text((DOCKER / "compose.yaml").read_text().replace("shm_size:", "shmsize:"))
    assert run(*check, str(misspelt)).returncode == 1


def test_no_service_is_privileged() -> None:
    """No service gets more than it needs, and nothing of the host's is shared."""
    for name, service in SERVICES.items():
        assert not {"privileged", "ipc", "cap_add"} & service.keys(), name
        assert service.get("network_mode", "none") == "none", name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
    for name in ("kvd", "pids"):
        assert SERVICES[name]["cap_drop"] == ["ALL"]
        assert SERVICES[name]["read_only"] is True
        assert SERVICES[name]["security_opt"] == ["no-new-privileges:true"]


def test_with_staging_engine_and_kvd_share_the_sockets_alone() -> None:
    """No GPU and no numbering of processes for kvd; otherwise both are those of compose.yaml."""
    compose = yaml.safe_load((DOCKER / "compose.staging.yaml").read_text())
    kvd, vllm = compose["services"]["kvd"], compose["services"]["vllm"]
    usual, usual_vllm = SERVICES["kvd"], SERVICES["vllm"]
    assert usual.keys() - kvd.keys() == {"build", "pid", "depends_on", "deploy"}
    assert usual_vllm.keys() - vllm.keys() == {"build", "pid"}
    same = kvd.keys() & usual.keys() - {"environment", "stop_grace_period"}
    assert {key: kvd[key] for key in same} == {key: usual[key] for key in same}
    assert kvd["environment"] == usual["environment"] | {"NVIDIA_VISIBLE_DEVICES": "void"}
    assert int(kvd["stop_grace_period"].removesuffix("s")) >= stop_seconds(0)
    for key in ("group_add", "volumes", "shm_size", "ports", "restart", "deploy"):
        assert vllm[key] == usual_vllm[key]
    options, usual_options = (json.loads(of["command"][-1]) for of in (vllm, usual_vllm))
    extra = {"kv_connector_extra_config": {"transfer": "staging"}}
    assert options == usual_options | extra


def test_an_engine_in_namespaces_of_its_own_stages(shared_daemon: Daemon, tmp_path: Path) -> None:
    """It has users, processes, network and IPC of its own, as in a container without rights."""
    own = ("--user", "--map-current-user", "--pid", "--fork", "--net", "--ipc")
    if run(tool("unshare"), *own, "true").returncode:
        pytest.skip("this machine allows no user namespaces")
    engine = write_torch_engine(tmp_path)
    command = ("unshare", *own, sys.executable, engine, shared_daemon.runtime_dir, "staging")
    done = run(*command, PYTHONPATH=SOURCE_PATH)
    assert (done.stderr, done.stdout) == ("", "staging True\n")


def test_a_large_pool_fits() -> None:
    """The default of shm_size is above that of the pool, and a stop has time to unpin it."""
    kvd = SERVICES["kvd"]
    (pool,) = re.findall(r":-(\d+)GiB", kvd["environment"]["KVD_CPU_BYTES"])
    (room,) = re.findall(r":-(\d+)gb", kvd["shm_size"])
    assert int(room) > int(pool)
    grace = int(kvd["stop_grace_period"].removesuffix("s"))
    assert grace >= stop_seconds(int(pool))
    documented = re.findall(r"(\d+) s\s+(?:# )?here, (\d+) s for 1 TiB", COMPOSE)
    assert documented == [(str(ceil(stop_seconds(int(pool)))), str(ceil(stop_seconds(1024))))]


def test_a_mooncake_cluster_is_closed_to_others() -> None:
    """Its network leads nowhere else, nothing is published, and kvd is told where the master is."""
    text = (DOCKER / "compose.mooncake.yaml").read_text()
    compose = yaml.safe_load(text)
    assert compose["networks"] == {"mooncake": {"internal": True}}
    services = compose["services"]
    for name, service in services.items():
        assert service["networks"] == ["mooncake"], name
        assert "ports" not in service, name
        if name != "kvd":
            assert (service["cap_drop"], service["read_only"]) == (["ALL"], True)
    (setting,) = re.findall(r"KVD_TIER: \$\{KVD_TIER:-(.+)\}", text)
    (tier,) = parse_tiers([setting])
    assert not tier_problems([tier])
    host, _, port = tier.options["master"].partition(":")
    assert f"--rpc_port={port}" in services[host]["command"]
    assert f"--master_server_address={host}:{port}" in services["mooncake-store"]["command"]
    assert "KVD_TIER" in {known.variable for known in SETTINGS.values()}


def test_the_user_of_the_image_is_one_number_everywhere() -> None:
    """User and group by number, as Kubernetes wants it, and the engine's group is that one."""
    (user, group) = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)[0]
    assert f"--gid {group} kvd" in DOCKERFILE
    assert f"--uid {user} " in DOCKERFILE
    assert SERVICES["vllm"]["group_add"] == [group]
    runtime_dir = Settings().runtime_dir
    assert f"runtime:{runtime_dir}:ro" in SERVICES["vllm"]["volumes"]
    assert "KVD_RUNTIME_DIR=" + runtime_dir in DOCKERFILE


def test_probes_follow_readiness_and_life(daemon: Daemon, tmp_path: Path) -> None:
    """Ready: both pass, /readyz by default. Drained: that fails with the reason, /livez passes.

    Without a daemon they name the socket's path.
    """

    def probe(*path: str, of: Path = daemon.runtime_dir) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "-m", "kvd.report.probe", *path)
        return run(*command, KVD_RUNTIME_DIR=str(of))

    def passes(*path: str) -> None:  # HTTP may not have started yet
        done = eventually(lambda: probe(*path), lambda it: not it.returncode)
        assert (done.stdout, done.stderr) == ("ok\n", "")

    passes()
    passes("/livez")
    assert run_kvd("drain", "--runtime-dir", str(daemon.runtime_dir)).returncode == 0
    assert eventually(probe, lambda done: "drain" in done.stdout).returncode == 1
    passes("/livez")
    without = probe(of=tmp_path)
    assert without.returncode == 1
    assert f"{tmp_path}/http.sock" in without.stderr


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What `make wheels` builds: the wheel of daemon and client, then that of the tools."""
    folder = tmp_path_factory.mktemp("dist")
    binaries = Path(sys.executable).parent
    command = (tool("make"), "--assume-old=.venv/.base", "wheels", f"DIST={folder}")
    done = run(*command, f"BIN={binaries}", where=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(folder.iterdir())


def test_a_wheel_holds_what_is_not_python(wheels: list[Path]) -> None:
    """Kernel, page and marker files that lie in the packages are in the wheels too."""
    packed = {name for wheel in wheels for name in zipfile.ZipFile(wheel).namelist()}
    packages = ("kvd", "client/kvd_client", "client/tools/kvd_tools", "proto/kvd_proto")
    tracked = run("git", "-C", ROOT, "ls-files", *packages)
    assert tracked.returncode == 0, tracked.stderr
    files = [name for name in tracked.stdout.splitlines() if (ROOT / name).exists()]
    names = {re.sub("^(client/tools|client|proto)/", "", name) for name in files}
    assert {name for name in names if not name.endswith(".py")} >= {"kvd/report/page/app.js"}
    assert names <= packed


def test_the_wheels_install_without_an_index_and_run(wheels: list[Path], tmp_path: Path) -> None:
    """In a new environment the command, a tool's command and the client are those of the wheels."""
    venv.create(tmp_path)
    python = tmp_path / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    done = run(*pip, "--no-index", "--no-deps", *wheels)
    assert done.returncode == 0, done.stderr
    # Their dependencies are those of this environment; the path of an editable install is not read.
    (site,) = tmp_path.glob("lib/python*/site-packages")
    (here,) = {path for path in sys.path if path.endswith("site-packages")}
    (site / "dependencies.pth").write_text(f"{here}\n")
    kvd = tmp_path / "bin" / "kvd"
    assert run(kvd, "--version", where=tmp_path).stdout.strip() == f"kvd, version {VERSION}"
    assert "--world-size" in run(kvd, "demo", "--help", where=tmp_path).stdout
    code = "import kvd, kvd_client, kvd_proto, kvd_tools, kvd_vllm_plugin as p; print(p.__file__)"
    assert run(python, "-c", code, where=tmp_path, PYTHONPATH="").stdout.startswith(str(site))


def test_no_instruction_installs_by_name() -> None:
    """Pages, scripts and errors name the checkout or a wheel: the name may be another's."""
    by_name = r"install[^|`]* '?kvd-offload"
    places = (":!tests", ":!CHANGELOG.md", ":!pyproject.toml")
    matches = run("git", "-C", ROOT, "grep", "-nE", by_name, "--", ".", *places)
    assert matches.stdout == ""
