"""Alerts and the dashboard query exported metrics only, and the alerts fire when they should."""

import json
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.launch.emitters import render, training_job
from holdfast.launch.emitters.pod import METRICS_LABEL, METRICS_PORT, pod_template
from holdfast.launch.emitters.pytorchjob import INDEX_LABEL
from holdfast.pipelines.backends.request import check_for_cluster
from holdfast.spec import SpecError
from holdfast.telemetry.metrics import METRICS
from tests.manifests.rendering import MANIFESTS
from tests.train.tiny_run import tiny_spec

FOLDER = MANIFESTS / "components" / "monitoring"
NAME = re.compile(r"holdfast_[a-z_]+|DCGM_FI_[A-Z_]+")
RULES = yaml.safe_load((FOLDER / "rules.yaml").read_text())["spec"]
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
SLOWED = "HoldfastAcceleratorSlowed"
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def promtool(*arguments: str) -> None:
    if (tool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed (Debian: prometheus), so no rule can be tried")
    process = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == 0, process.stdout + process.stderr


def test_the_dashboard_shows_all_that_is_exported_and_nothing_else() -> None:
    queried = {name for query in QUERIES for name in NAME.findall(query)}
    assert queried == set(METRICS)
    for query in QUERIES:
        for legend in (panel for panel in DASHBOARD["panels"] for panel in panel["targets"] if panel["expr"] == query):
            labels = set(re.findall(r"{{(\w+)}}", legend["legendFormat"])) - {"run"}
            assert labels <= {label for name in NAME.findall(query) for label in METRICS[name][1]}, query
    (run,) = (variable for variable in DASHBOARD["templating"]["list"] if variable["name"] == "run")
    assert NAME.findall(run["query"]) == ["holdfast_step"]


def test_alerts_use_exported_metrics_and_have_an_action() -> None:
    for rule in RULES["groups"][0]["rules"]:
        assert set(NAME.findall(rule["expr"])) <= set(METRICS), rule["alert"]
        assert rule["annotations"]["action"]


def test_promtool_takes_every_query_of_the_dashboard(tmp_path: Path) -> None:
    queries = [query.replace('=~"$run"', '=~".*"') for query in QUERIES]
    rules = [{"record": f"query:{index}", "expr": query} for index, query in enumerate(queries)]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", str(path))


def series(name: str, values: str, labels: str = 'run="r", pod="p"') -> dict[str, str]:
    return {"series": f"{name}{{{labels}}}", "values": values}


def alert(name: str, minute: int, *, comes: bool, **labels: str) -> dict[str, Any]:
    (rule,) = (candidate for candidate in RULES["groups"][0]["rules"] if candidate["alert"] == name)
    labels = {"run": "r", **labels}
    words = {
        key: re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels[found[1]], text)
        for key, text in rule["annotations"].items()
    }
    expected = [{"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": words}] if comes else []
    return {"alertname": name, "eval_time": f"{minute}m", "exp_alerts": expected}


def test_an_alert_fires_on_a_fault_and_not_on_a_healthy_run(tmp_path: Path) -> None:
    # Here, time() is seconds from 0. Samples arrive every minute until minute 60, and none after that.
    in_progress = [series("holdfast_steps", "100+0x180"), series("holdfast_step", "50+0x180")]
    well = [
        series("holdfast_last_event_timestamp_seconds", "0+60x60 3600+0x120"),
        series("holdfast_checkpoint_timestamp_seconds", "0+60x60 3600+0x120"),
        series("holdfast_checkpoint_lag_steps", "3+0x180"),
        series("holdfast_checkpoint_failures", "0+0x60 1+1x120"),
        series("holdfast_attempt", "1+0x60 2+1x120"),
        series("holdfast_tokens_per_second", "1000+0x120 500+0x60"),
        series("holdfast_goodput_ratio", "0.97+0x60 0.5+0x120"),
    ]
    names = {"HoldfastTrainingSilent": 73, "HoldfastCheckpointOld": 130, "HoldfastSavesFail": 65,
             "HoldfastRestartsOften": 70, "HoldfastSlow": 140, "HoldfastGoodputLow": 100}  # fmt: skip
    assert {*names, SLOWED} == {rule["alert"] for rule in RULES["groups"][0]["rules"]}
    alerts = [alert(name, minute, comes=True) for name, minute in names.items()]
    alerts += [alert(name, 55, comes=False) for name in names]
    completed = [series("holdfast_steps", "100+0x180"), series("holdfast_step", "100+0x180"), well[0]]
    quiet = [alert("HoldfastTrainingSilent", 100, comes=False)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(RULES))
    tests = [{"interval": "1m", "input_series": samples, "alert_rule_test": expected}
             for samples, expected in ((in_progress + well, alerts), (completed, quiet))]  # fmt: skip
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests})
    )
    promtool("check", "rules", str(tmp_path / "rules.yaml"))
    promtool("test", "rules", str(tmp_path / "tests.yaml"))


def test_a_thermally_throttled_accelerator_raises_an_alert_and_a_power_cap_does_not(
    tmp_path: Path,
) -> None:
    reasons, expected = "DCGM_FI_DEV_CLOCKS_EVENT_REASONS", alert(SLOWED, 30, comes=False, rank="0")
    samples = [series(reasons, "104+0x60", 'gpu="0", Hostname="n"')]  # of DCGM's own exporter, without a run label
    for rank, (bits, comes) in enumerate([(0x24, True), (0x8, True), (0x48, True), (0x4 | 0x100 | 0x10, False)]):
        samples.append(series(reasons, f"4+0x5 {bits}+0x55", f'run="r", rank="{rank}"'))
        expected["exp_alerts"] += alert(SLOWED, 30, comes=comes, rank=str(rank))["exp_alerts"]
    early = expected | {"eval_time": "10m", "exp_alerts": []}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(RULES))
    test = {"interval": "1m", "input_series": samples, "alert_rule_test": [early, expected]}
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]})
    )
    promtool("test", "rules", str(tmp_path / "tests.yaml"))


def targets(pods: list[dict[str, str]]) -> list[int]:
    """The pods with these labels that Prometheus scrapes: the operator's interpretation of the PodMonitor."""
    monitor = yaml.safe_load((FOLDER / "pod-monitor.yaml").read_text())["spec"]
    (chosen,) = monitor["selector"]["matchExpressions"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    (relabeling,) = endpoint["relabelings"]
    assert (endpoint["port"], relabeling["action"], chosen["operator"]) == (METRICS_PORT, "keep", "In")
    ports = []
    for number, pod in enumerate(pods):
        meta_labels = {"__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", key): value for key, value in pod.items()}
        text = relabeling["separator"].join(meta_labels.get(name, "") for name in relabeling["sourceLabels"])
        if pod.get(chosen["key"]) in chosen["values"] and re.fullmatch(relabeling["regex"], text):
            ports.append(number)
    return ports


def labels_of(*overrides: str) -> dict[str, str]:
    spec = tiny_spec("store=s3://bucket/x", "training.global_batch=44", *overrides)
    job = training_job(spec, "r", 1, "s3://bucket/x")
    labels: dict[str, str] = pod_template(job, "pytorch", ["true"])["metadata"]["labels"]
    return labels


@pytest.mark.parametrize("index", [INDEX_LABEL, "batch.kubernetes.io/job-completion-index", "volcano.sh/task-index"])
def test_the_rank_0_pod_of_a_job_with_metrics_is_scraped(index: str) -> None:
    shows, elastic = "telemetry.metrics_port=9400", ("training.determinism=elastic", "cluster.nodes.max=11")
    pods = [{index: str(number)} for number in (0, 1, 2, 10)]
    assert targets([{**labels_of(shows, "cluster.nodes.max=11", "cluster.nodes.min=11"), **pod} for pod in pods]) == [0]
    assert targets([{**labels_of(shows, *elastic), **pod} for pod in pods]) == [0, 1, 2, 3]  # rank 0 can be on any pod
    assert targets([{**labels_of(), **pod} for pod in pods]) == []


def test_the_port_has_a_name_and_the_policy_opens_it_in_those_pods_alone() -> None:
    policy = yaml.safe_load((FOLDER / "network-policy.yaml").read_text())["spec"]
    assert policy["podSelector"]["matchExpressions"] == [{"key": METRICS_LABEL, "operator": "Exists"}]
    for overrides, ports in (((), None), (("telemetry.metrics_port=9400",), [9400])):
        job = training_job(tiny_spec("store=s3://bucket/x", *overrides), "r", 1, "s3://bucket/x")
        pod = pod_template(job, "pytorch", ["true"])
        declared = pod["spec"]["containers"][0].get("ports")
        assert (declared and [entry["containerPort"] for entry in declared if entry["name"] == METRICS_PORT]) == ports


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_figures_that_no_prometheus_would_reach_in_a_pod_are_refused(host: str) -> None:
    spec = tiny_spec("store=s3://bucket/x", "telemetry.metrics_port=9400", f"telemetry.metrics_host={host}")
    for refuses in (check_for_cluster, partial(render, target="pytorchjob")):
        with pytest.raises(SpecError, match=r"telemetry\.metrics_host: is inside the pod") as error:
            refuses(spec)
        assert "use 0.0.0.0, or remove telemetry.metrics_port" in str(error.value)
