"""A policy as configuration of Kueue or Volcano: objects that fit the official schemas, or a refusal with a reason."""

from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import yaml

from holdfast.launch.kubernetes.schemas import known_kinds, validate
from holdfast.simulation import POLICIES, ClusterModel, Job
from holdfast.simulation.cluster import NodeGroup
from holdfast.simulation.engines import Configuration, Engine, configuration
from holdfast.spec.errors import SpecError

ONE = ClusterModel(groups=(NodeGroup(name="H100", nodes=4),), quotas={"team-a": 2.5})
TWO = ONE.model_copy(update={"groups": (*ONE.groups, NodeGroup(name="a100.spot", nodes=2, gpus=4))})
JOBS = [Job("1", 0.0, 8, 60.0, tenant="team-a"), Job("2", 0.0, 8, 60.0, tenant="Team_B", priority=2)]
EXPRESSED = {
    "kueue": {"fifo", "backfill", "priority", "fair-share", "drf", "topology"},
    "volcano": {"backfill", "priority", "drf", "topology"},
}
PAIRS = [(engine, policy) for engine, policies in EXPRESSED.items() for policy in sorted(policies)]


def of_kind(made: Configuration, kind: str) -> dict[str, dict[str, Any]]:
    return {document["metadata"]["name"]: document for document in made.objects if document["kind"] == kind}


def scheduler(made: Configuration) -> dict[str, Any]:
    (config_map,) = of_kind(made, "ConfigMap").values()
    return yaml.safe_load(config_map["data"]["volcano-scheduler.conf"])


@pytest.mark.parametrize(("engine", "policy"), PAIRS)
def test_every_object_fits_its_official_schema(engine: Engine, policy: str) -> None:
    kinds = known_kinds()
    documents = [
        document
        for document in configuration(engine, policy, ONE, JOBS).objects
        if (document["apiVersion"], document["kind"]) in kinds
    ]
    assert documents
    for document in documents:
        validate(document)
    with pytest.raises(jsonschema.ValidationError):
        validate({**documents[-1], "spec": {**documents[-1].get("spec", {}), "misspelt": 1}})


@pytest.mark.parametrize("engine", ["kueue", "volcano"])
def test_a_policy_that_an_engine_cannot_express_is_refused_with_alternatives(engine: Engine) -> None:
    for policy in sorted(set(POLICIES) - EXPRESSED[engine]):
        with pytest.raises(
            SpecError, match=f"{policy}.*cannot be expressed to {engine}|cannot be expressed to {engine}"
        ) as error:
            configuration(engine, policy, ONE, JOBS)
        assert policy in str(error.value)
        assert "use backfill" in str(error.value) or "use fifo, backfill" in str(error.value)
    with pytest.raises(SpecError, match="shares of each group"):
        configuration(engine, "drf", TWO, JOBS)


def test_kueue_counts_the_accelerators_of_each_group_and_nothing_else() -> None:
    files = configuration("kueue", "fifo", TWO, JOBS)
    (queue,) = of_kind(files, "ClusterQueue").values()
    (group,) = queue["spec"]["resourceGroups"]
    quotas = {flavor["name"]: flavor["resources"][0]["nominalQuota"] for flavor in group["flavors"]}
    assert (group["coveredResources"], quotas) == (["nvidia.com/gpu"], {"h100": "32", "a100-spot": "8"})
    assert queue["spec"]["queueingStrategy"] == "StrictFIFO"
    assert set(of_kind(files, "LocalQueue")) == {"team-a", "team-b"}
    assert set(of_kind(files, "ResourceFlavor")) == set(quotas)
    assert files.settings is not None
    assert "memory" in files.settings["resources"]["excludeResourcePrefixes"]


def test_kueue_lets_priorities_evict_and_shares_by_use_or_by_what_is_held() -> None:
    priority = configuration("kueue", "priority", ONE, JOBS)
    classes = {name: document["value"] for name, document in of_kind(priority, "WorkloadPriorityClass").items()}
    assert classes == {"holdfast-0": 0, "holdfast-2": 2000}
    assert of_kind(priority, "ClusterQueue")["holdfast"]["spec"]["preemption"]["withinClusterQueue"] == "LowerPriority"
    fair_share = configuration("kueue", "fair-share", ONE, JOBS)
    weights = {
        name: document["spec"]["fairSharing"]["weight"] for name, document in of_kind(fair_share, "LocalQueue").items()
    }
    assert weights == {"team-a": "2500m", "team-b": "1000m"}
    assert fair_share.settings is not None
    assert fair_share.settings["admissionFairSharing"]["usageHalfLifeTime"] == "168h"
    drf = configuration("kueue", "drf", ONE, JOBS)
    queues = of_kind(drf, "ClusterQueue")
    assert {name: document["spec"]["fairSharing"]["weight"] for name, document in queues.items()} == weights
    assert {document["spec"]["cohortName"] for document in queues.values()} == set(of_kind(drf, "Cohort"))
    flavors = [document["spec"]["resourceGroups"][0]["flavors"][0] for document in queues.values()]
    assert {document["resources"][0]["nominalQuota"] for document in flavors} == {
        "0"
    }  # all quota is borrowed, so all of it is shared


def test_volcano_gets_plugins_actions_and_queues_with_whole_weights() -> None:
    priority = scheduler(configuration("volcano", "priority", ONE, JOBS))
    assert priority["actions"] == "enqueue, allocate, preempt, backfill"
    assert {"name": "gang", "enablePreemptable": False} in priority["tiers"][0]["plugins"]
    assert "preempt" not in scheduler(configuration("volcano", "backfill", ONE, JOBS))["actions"]
    shared = configuration("volcano", "drf", ONE.model_copy(update={"quotas": {"team-a": 1.5, "Team_B": 0.5}}), JOBS)
    assert {"name": "proportion"} in scheduler(shared)["tiers"][1]["plugins"]
    assert {name: queue["spec"]["weight"] for name, queue in of_kind(shared, "Queue").items()} == {
        "team-a": 3,
        "team-b": 1,
    }
    assert {"name": "network-topology-aware"} in scheduler(configuration("volcano", "topology", ONE, JOBS))["tiers"][1][
        "plugins"
    ]


def test_two_tenants_of_one_name_and_a_priority_beyond_all_classes_are_refused() -> None:
    with pytest.raises(SpecError, match="makes no name of a queue that is its own"):
        configuration("kueue", "fifo", ONE, [*JOBS, replace(JOBS[0], tenant="Team-A")])
    with pytest.raises(SpecError, match="is not one that a class can have"):
        configuration("kueue", "priority", ONE, [replace(JOBS[0], priority=10**7)])
    with pytest.raises(SpecError, match="is no share of a cluster"):
        configuration("volcano", "drf", ONE.model_copy(update={"quotas": {"team-a": 0.0}}), JOBS)
