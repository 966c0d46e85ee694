"""What a cluster runs: the manifests; alert rules, recording rules and the dashboard."""

import importlib.util
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvd.broker.forecast import SIZES
from kvd.config.settings import Settings
from kvd.config.sources import Sources
from kvd.config.values import parse_tiers
from kvd.metrics.counts import DIRECTIONS, GET_OUTCOMES, PUT_OUTCOMES, STAGES
from kvd.metrics.schema import REPORT_FIELDS
from kvd.report.app import Exposition
from kvd.tier.contract import tier_problems
from kvd.version import VERSION
from kvd_proto.messages import JobStatus
from kvd_proto.text import parse_size
from tests.deploy.places import DEPLOY, ROOT, run, stop_seconds, tool
from tests.report.reports import empty_report

KUBERNETES = DEPLOY / "kubernetes"
FILES = ("daemonset.yaml", "engine.yaml", "mooncake.yaml", "sidecar.yaml")
MONITOR = "prometheus/podmonitor.yaml"
GIB = 2**30


def documents(name: str) -> list[dict[str, Any]]:
    """The objects of one file."""
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


def pod(name: str) -> dict[str, Any]:
    """The pod's specification in one file."""
    spec: dict[str, Any] = documents(name)[-1]["spec"]["template"]["spec"]
    return spec


def container(name: str, of: str = "kvd") -> dict[str, Any]:
    """A pod's container, the daemon's or another."""
    spec = pod(name)
    every: list[dict[str, Any]] = [*spec["containers"], *spec.get("initContainers", [])]
    (named,) = [container_spec for container_spec in every if container_spec["name"] == of]
    return named


def mounts(of: dict[str, Any]) -> dict[str, str]:
    """The paths at which a container has each volume."""
    return {mount["name"]: mount["mountPath"] for mount in of["volumeMounts"]}


def size(text: str) -> int:
    """A quantity such as 68Gi in bytes."""
    return int(text.removesuffix("Gi")) * GIB


@pytest.mark.parametrize("name", [*FILES, MONITOR])
@pytest.mark.parametrize("version", ["1.29", kubernetes_validate.latest_version()])
def test_manifests_follow_the_schemas(name: str, version: str) -> None:
    """Strictly: an unknown key is an error, in the oldest release with sidecars and the newest."""
    for document in documents(name):
        if document["apiVersion"] == "monitoring.coreos.com/v1":
            continue  # of the Prometheus Operator: no type of Kubernetes' own
        kubernetes_validate.validate(document, version, strict=True)


def test_registry_and_version_of_an_image_stand_in_one_place() -> None:
    """Manifests name images without registry and tag; kustomization.yaml says which each one is."""
    text = (KUBERNETES / "kustomization.yaml").read_text()
    kustomization = yaml.safe_load(text)
    named = {image["name"]: image["newTag"] for image in kustomization["images"]}
    assert named["kvd"] == named["kvd-mooncake"] == VERSION
    used = {
        image
        for name in FILES
        for image in re.findall(r"image: (\S+)", (KUBERNETES / name).read_text())
    }
    assert used == set(named)
    assert set(re.findall(r"- (\S+\.yaml)", text)) == set(FILES)
    assert kustomization["resources"] == ["daemonset.yaml"]


def test_the_operators_job_is_the_one_of_the_rules() -> None:
    """The PodMonitor takes job="kvd" from a label of the pods, and its port is one that listens."""
    monitor, policy = documents(MONITOR)
    labels = documents("daemonset.yaml")[-1]["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"] == labels
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    assert labels[monitor["spec"]["jobLabel"]] == "kvd"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    component = yaml.safe_load((KUBERNETES / "prometheus/kustomization.yaml").read_text())
    patch = yaml.safe_load(component["patches"][0]["patch"])
    (patched,) = patch["spec"]["template"]["spec"]["containers"]
    assert patched["name"] == container("daemonset.yaml")["name"]
    (port,) = patched["ports"]
    assert endpoint["port"] == port["name"]
    assert policy["spec"]["ingress"][0]["ports"] == [{"port": port["name"]}]
    variables = {each["name"]: each["value"] for each in patched["env"]}
    settings = Sources(config=None, environment=variables).load().settings
    assert settings.http_listen == f"0.0.0.0:{port['containerPort']}"


@pytest.mark.parametrize("name", ["daemonset.yaml", "sidecar.yaml"])
def test_kvd_gets_no_rights(name: str) -> None:
    """Not privileged, not root, no capability, read-only root, no GPU taken away from engines."""
    kvd = container(name)
    security = pod(name)["securityContext"] | kvd["securityContext"]
    assert "privileged" not in security
    expected = {
        "runAsNonRoot": True,
        "runAsUser": 9330,
        "runAsGroup": 9330,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert {key: security.get(key) for key in expected} == expected
    assert not [key for key in kvd["resources"]["limits"] if "gpu" in key]
    assert not {"hostIPC", "hostNetwork"} & pod(name).keys()


def test_with_staging_kvd_needs_no_gpu_and_no_numbers_of_the_node(tmp_path: Path) -> None:
    """The component takes out runtime class, hostPID and NVIDIA's nodes; the other one still fits.

    No other key of the pod goes, and kvd's container sees no GPU.
    """
    folder = shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    file = folder / "kustomization.yaml"
    rendered = {}
    for components in ("[prometheus]", "[prometheus, staging]"):
        file.write_text(
            re.sub(
                r"^components: .*",
                f"components: {components}",
                file.read_text(),
                flags=re.MULTILINE,
            )
        )
        done = run(tool("kubectl"), "kustomize", folder)
        assert done.returncode == 0, done.stderr
        objects = list(yaml.safe_load_all(done.stdout))
        (daemonset,) = [each for each in objects if each["kind"] == "DaemonSet"]
        rendered[components] = daemonset["spec"]["template"]["spec"]
    exporting, staging = rendered.values()
    only_export = {"runtimeClassName", "hostPID", "nodeSelector", "tolerations"}
    assert exporting.keys() - staging.keys() == only_export
    assert staging.keys() <= exporting.keys()
    (kvd,) = staging["containers"]
    variables = {each["name"]: each["value"] for each in kvd.pop("env")}
    assert variables == {"NVIDIA_VISIBLE_DEVICES": "void", "KVD_HTTP_LISTEN": "0.0.0.0:9330"}
    assert kvd.items() <= exporting["containers"][0].items()


def test_init_containers_close_the_directories_to_others() -> None:
    """What lies on the node becomes kvd's, which fsGroup does not do; an emptyDir is for a group.

    Kubernetes makes an emptyDir for every user to write, which kvd refuses.
    """
    spec = pod("daemonset.yaml")
    (init,) = spec["initContainers"]
    assert mounts(init).keys() == {vol["name"] for vol in spec["volumes"] if "hostPath" in vol}
    assert set(mounts(init).values()) <= set(init["command"])
    assert init["command"][:5] == ["install", "-d", "-m", "0750", "-o"]
    init, kvd = pod("sidecar.yaml")["initContainers"]
    assert init["command"] == ["chmod", "2770", *mounts(init).values()]
    assert set(mounts(init).values()) == {Settings().runtime_dir, Settings().pool_dir}
    assert mounts(init).items() <= mounts(kvd).items()


@pytest.mark.parametrize("name", ["daemonset.yaml", "sidecar.yaml"])
def test_the_pool_fits_the_memory(name: str, tmp_path: Path) -> None:
    """The limit is 4 GiB or more above cpu_bytes, the volume above it; a stop has time."""
    kvd = container(name)
    if name == "daemonset.yaml":
        file = tmp_path / "kvd.toml"
        file.write_text(documents(name)[1]["data"]["kvd.toml"])
        pool = Sources(config=file, environment={}).load().settings.pool_bytes
    else:
        pool = parse_size(kvd["env"][0]["value"])
        (volume,) = [vol["emptyDir"] for vol in pod(name)["volumes"] if vol["name"] == "pool"]
        assert size(volume["sizeLimit"]) > pool
        assert volume["medium"] == "Memory"
    assert pool is not None
    limit = kvd["resources"]["limits"]["memory"]
    assert size(limit) >= pool + 4 * GIB
    assert limit == kvd["resources"]["requests"]["memory"]
    assert pod(name)["terminationGracePeriodSeconds"] >= stop_seconds(pool / GIB)


@pytest.mark.parametrize("name", ["daemonset.yaml", "sidecar.yaml"])
def test_probes_ask_what_they_should(name: str) -> None:
    """Start and liveness ask for the loop, readiness for the pool; all through the container."""
    kvd = container(name)
    paths = {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
    for kind in paths.keys() & kvd.keys():
        command = ["python", "-m", "kvd.report.probe", paths[kind]]
        assert (kvd[kind]["exec"]["command"], kvd[kind]["timeoutSeconds"]) == (command, 5)
    start = kvd["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 300
    assert "livenessProbe" in kvd


@pytest.mark.parametrize("name", ["engine.yaml", "sidecar.yaml"])
def test_engines_share_the_sockets_read_only_and_not_the_pool(name: str) -> None:
    """The runtime directory is mounted read-only where kvd expects it; /dev/shm is their own."""
    engine = container(name, "vllm")
    by_path = {mount["mountPath"]: mount for mount in engine["volumeMounts"]}
    assert by_path[Settings().runtime_dir]["readOnly"] is True
    memory = by_path["/dev/shm"]["name"]
    assert [vol["name"] for vol in pod(name)["volumes"] if "emptyDir" in vol].count(memory) == 1
    assert name != "sidecar.yaml" or memory not in mounts(container(name))


def test_a_mooncake_cluster_is_found_and_closed_to_others() -> None:
    """Stores and kvd are told the master's service; all run without rights, closed to others."""
    objects = {
        (each["kind"], each["metadata"]["name"]): each for each in documents("mooncake.yaml")
    }
    service = objects["Service", "mooncake-master"]
    port = service["spec"]["ports"][0]["port"]
    address = f"mooncake-master.{service['metadata']['namespace']}.svc:{port}"
    pods = {
        name: objects[kind, name]["spec"]["template"]
        for kind, name in (("Deployment", "mooncake-master"), ("DaemonSet", "mooncake-store"))
    }
    (store,) = pods["mooncake-store"]["spec"]["containers"]
    (master,) = pods["mooncake-master"]["spec"]["containers"]
    assert f"--master_server_address={address}" in store["args"]
    assert f"--rpc_port={port}" in master["args"]
    text = (KUBERNETES / "mooncake.yaml").read_text()
    (setting,) = re.findall(r'^#   tier = \["(.+)"\]$', text, re.MULTILINE)
    (tier,) = parse_tiers([setting])
    assert tier.options["master"] == address
    assert not tier_problems([tier])
    (gives,) = (arg for arg in store["args"] if arg.startswith("--global_segment_size="))
    segment = parse_size(gives.partition("=")[2].replace(" GB", "GiB"))
    assert size(store["resources"]["limits"]["memory"]) >= segment + 4 * GIB
    selector = objects["NetworkPolicy", "mooncake"]["spec"]["podSelector"]["matchExpressions"][0]
    assert {*pods, "kvd"} == set(selector["values"])
    for name, template in pods.items():
        assert template["metadata"]["labels"]["app.kubernetes.io/name"] == name
        security = template["spec"]["containers"][0]["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert template["spec"]["securityContext"]["runAsUser"] == 9330


PROMETHEUS = DEPLOY / "prometheus"
GRAFANA = DEPLOY / "grafana"
PUBLISHED = "https://docs.example.com/kvd/"  # whoever deploys puts their own address in
GROUPS = yaml.safe_load((PROMETHEUS / "kvd.rules.yml").read_text())["groups"]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
DASHBOARD: dict[str, Any] = json.loads((GRAFANA / "kvd.json").read_text())


def promtool(*arguments: str, where: Path = PROMETHEUS) -> str:
    """What promtool prints; it must be content."""
    done = run(tool("promtool"), *arguments, where=where)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def dashboard_queries() -> Iterator[str]:
    """Every expression of the dashboard, with its variables filled in."""
    queries = [query["expr"] for panel in DASHBOARD["panels"] for query in panel.get("targets", [])]
    queries += [each["expr"] for each in DASHBOARD["annotations"]["list"]]
    for query in queries:
        yield re.sub(r"\$__(rate_)?interval", "5m", query).replace("$instance", ".*")


def expressions() -> list[str]:
    """Every expression of rules and dashboard."""
    return [*(rule["expr"] for rule in RULES), *dashboard_queries()]


def test_promtool_takes_rules_queries_and_scrape_configuration(tmp_path: Path) -> None:
    """Rules, the sample configuration and every query of the dashboard are valid."""
    promtool("check", "rules", "kvd.rules.yml")
    promtool("check", "config", "scrape.yml")
    rules = [
        {"record": f"dashboard:query{number}", "expr": query}
        for number, query in enumerate(dashboard_queries())
    ]
    file = tmp_path / "dashboard.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(file), where=tmp_path)


@pytest.mark.slow
def test_alerts_fire_when_they_should_and_only_then() -> None:
    """The unit tests of the rules pass, and no alert is without one that makes it fire."""
    promtool("test", "rules", "kvd.rules.test.yml")
    tests = (PROMETHEUS / "kvd.rules.test.yml").read_text()
    assert set(re.findall(r'alertname="(\w+)"', tests)) == {rule["alert"] for rule in ALERTS}


def test_an_alert_says_what_is_wrong_and_what_to_do() -> None:
    """Summary, description, severity, and the URL of a section of docs/operations.md."""
    for rule in ALERTS:
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}, rule
        assert rule["labels"]["severity"] in {"page", "ticket"}, rule
        page, _, anchor = rule["annotations"]["runbook_url"].removeprefix(PUBLISHED).partition("#")
        assert anchor == rule["alert"].lower()
        text = (ROOT / "docs" / page).read_text().lower()
        assert re.search(rf"^#+ {anchor}$", text, re.MULTILINE), rule


def test_every_metric_that_is_used_is_served() -> None:
    """Names in rules and dashboard are those of /metrics, or recorded here."""
    served = {"up", "ALERTS"} | {rule["record"] for rule in RULES if "record" in rule}
    for family in Exposition(empty_report(), 0.0).collect():
        endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
        served |= {family.name + end for end in endings.get(family.type, [""])}
    used = set()
    for expression in expressions():
        without = re.sub(
            r'"[^"]*"|\{[^}]*\}|\b(by|on|group_left|ignoring) *\([^)]*\)', "", expression
        )
        used |= set(re.findall(r"\b(?:kvd|process)[\w:]+|\bup\b", without))
    assert len(used) > 40
    assert used <= served


def test_values_of_labels_are_ones_that_exist() -> None:
    """An outcome, answer, state, stage or direction in a selector is one that kvd reports."""
    known: dict[str, set[str]] = defaultdict(set)
    for row in REPORT_FIELDS:
        for label, value in row.declaration.labels:
            known[label].add(value)
    known |= {
        "direction": {*DIRECTIONS, "put", "get"},
        "stage": set(STAGES),
        "outcome": {*map(str, JobStatus), *PUT_OUTCOMES, *GET_OUTCOMES},
        "check": {"pool"},
        "job": {"kvd"},
        "instance": {".*"},
        "pool": {name for name, _ in SIZES} | {"unlimited"},
    }
    for expression in expressions():
        for label, _, value in re.findall(r'(\w+)(=|=~|!=|!~)"([^"]*)"', expression):
            assert set(value.split("|")) <= known[label], expression


def test_the_dashboard_is_what_its_generator_writes() -> None:
    """The file and the script beside it agree."""
    spec = importlib.util.spec_from_file_location("generate", GRAFANA / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.text() == (GRAFANA / "kvd.json").read_text()
