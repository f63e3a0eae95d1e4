"""The Grafana dashboard and the alert rules: what they name exists, and Prometheus understands them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferryd.observe.metrics import Metrics

FOLDER = Path(__file__).parents[2] / "deploy" / "observability"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is not installed"
)


def expressions() -> list[str]:
    """The expressions of every panel and rule."""
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [*panels, *(rule["expr"] for rule in RULES)]


def promtool(*arguments: str, folder: Path = FOLDER) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_metric_and_label_that_is_named_exists() -> None:
    labels: dict[str, set[str]] = {}
    metrics = Metrics()
    for metric in (*vars(metrics).values(), *metrics.gauges.values()):
        if hasattr(metric, "describe") and hasattr(metric, "_labelnames"):
            (described,) = metric.describe()
            for suffix in SUFFIXES[described.type]:
                labels[described.name + suffix] = {*metric._labelnames, "instance", "le"}
    plug_in = (Path(__file__).parents[2] / "clients/kvferry/vllm/missed.py").read_text()  # it needs vLLM to be imported
    (counter,) = re.findall(r'METRIC = "vllm:(\w+)"', plug_in)
    labels[f"{counter}_total"] = {"reason", "instance"}
    used = 0
    for expression in expressions():
        for name, selector in re.findall(r"(kvferry_\w+)(\{[^}]*\})?", expression):
            assert name in labels, f"{name} is no metric: {expression}"
            assert set(re.findall(r"(\w+)(?:=~|!~|!=|=)", selector)) <= labels[name], expression
            used += 1
    assert used > 30


def test_alerts_say_what_to_do_and_panels_do_not_overlap() -> None:
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "remedy"}
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@needs_promtool
def test_promtool_accepts_the_rules_and_their_cases_hold() -> None:
    promtool("check", "rules", "alerts.yaml")
    promtool("test", "rules", "alerts_test.yaml")


@needs_promtool
def test_promtool_accepts_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    """As rules: it has no other way to look at one."""
    asked = [each.replace("$__rate_interval", "5m").replace("$instance", ".*") for each in expressions()]
    rules = [{"record": f"panel:{number}", "expr": each} for number, each in enumerate(asked)]
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", "panels.yaml", folder=tmp_path)


@needs_promtool
def test_a_rule_that_is_wrong_is_noticed(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    rules = tmp_path / "alerts.yaml"
    rules.write_text(rules.read_text().replace("> 0.9", "> 0.99"))
    with pytest.raises(AssertionError, match="KvferryStagingFull"):
        promtool("test", "rules", "alerts_test.yaml", folder=tmp_path)
