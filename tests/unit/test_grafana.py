"""The dashboard and the alert rules that are shipped: whole, and about what a node says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import get_args

import pytest
import yaml

from prorl_trio.types.errors import FailureCause
from support.skips import because

FOLDER = Path(__file__).parents[2] / "launch/grafana"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
RULES = [rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
GRAPHS = [panel for panel in DASHBOARD["panels"] if panel["type"] == "timeseries"]


def test_each_graph_has_a_query_for_the_chosen_nodes_and_a_place_of_its_own():
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in GRAPHS}) == len(GRAPHS) >= 12
    for panel in GRAPHS:
        assert panel["targets"]
        assert all('instance=~"$instance"' in target["expr"] for target in panel["targets"]), panel["title"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24


def test_causes_that_are_nobodys_doing_alarm():
    (rule,) = [rule for rule in RULES if rule["alert"] == "ProrlInfrastructureFailures"]
    (named,) = re.findall(r'cause=~"([^"]*)"', rule["expr"])
    assert set(named.split("|")) == set(get_args(FailureCause)) - {"agent_fault", "agent_budget", "cancelled"}


NO_PROMTOOL = because("there is no promtool here", "apt-get install prometheus")


@pytest.mark.skipif(shutil.which("promtool") is None, reason=NO_PROMTOOL)
def test_prometheus_reads_the_rules():
    subprocess.run(["promtool", "check", "rules", FOLDER / "alerts.yaml"], check=True, capture_output=True)
