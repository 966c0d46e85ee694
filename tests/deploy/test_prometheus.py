"""Alert rules, recording rules and the dashboard, against promtool and a daemon's metrics."""

import importlib.util
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from kvd.broker.forecast import SIZES
from kvd.metrics.counts import DIRECTIONS, GET_OUTCOMES, PUT_OUTCOMES, STAGES
from kvd.metrics.schema import REPORT_FIELDS
from kvd.report.app import Exposition
from kvd_proto.messages import JobStatus
from tests.deploy.places import DEPLOY, ROOT, run, tool
from tests.report.reports import empty_report

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


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_is_wrong_and_what_to_do(rule: dict[str, Any]) -> None:
    """Summary, description, severity, and the URL of a section of docs/operations.md."""
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["labels"]["severity"] in {"page", "ticket"}
    page, _, anchor = rule["annotations"]["runbook_url"].removeprefix(PUBLISHED).partition("#")
    assert anchor == rule["alert"].lower()
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    assert anchor in {
        re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-")) for heading in headings
    }


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
