"""The network policies of an overlay, as kustomize renders them, allow every connection that a run
needs and no other.
"""

import itertools
from dataclasses import replace

import pytest
import yaml

from tests.manifests.flows import Outside, Pod, Policies
from tests.manifests.rendering import MANIFESTS, OVERLAYS, PROFILE, render

OURS, PROFILE_NAMESPACE = "holdfast", "my-profile"
NAMESPACES = {name: {"kubernetes.io/metadata.name": name, "app.kubernetes.io/part-of": "kubeflow-profile"}
              for name in (PROFILE_NAMESPACE, "another-profile")}  # fmt: skip
RANK = Pod(OURS, {"app.kubernetes.io/name": "holdfast", "app.kubernetes.io/component": "train"}, address="10.244.1.4")
PEER = Pod(OURS, RANK.labels, address="10.244.2.5")
STEPS = {
    name: Pod(OURS, {"app.kubernetes.io/name": "holdfast", "app.kubernetes.io/component": f"step-{name}"})
    for name in ("preprocess", "train", "evaluate", "register", "notify", "trigger")
}
MLFLOW = Pod(OURS, {"app.kubernetes.io/name": "mlflow"}, {"http": 5000})
DNS = Pod("kube-system", {"k8s-app": "kube-dns"})
STRANGER = Pod("default", {"app": "stranger"}, address="10.244.9.9")
NEIGHBOUR = Pod(OURS, {"app": "neighbour"}, address="10.244.3.3")
API_SERVER, S3, INTERNET = Outside("172.18.0.2"), Outside("52.218.0.1"), Outside("93.184.215.14")
DNS_CACHE = Outside("169.254.20.10")  # on a node, in its network: no pod that a policy could select
IDENTITY = {"169.254.169.254": 80, "169.254.170.23": 80}  # where clouds serve workload identities
KFP = {
    "ml-pipeline": (Pod("kubeflow", {"app": "ml-pipeline"}), (8887, 8888)),
    "metadata": (Pod("kubeflow", {"component": "metadata-grpc-server"}), (8080,)),
    "object store": (Pod("kubeflow", {"app": "seaweedfs"}), (8333,)),
}


def policies(overlay: str) -> Policies:
    documents = [document for document in render(overlay) if document["kind"] == "NetworkPolicy"]
    assert documents, "an overlay without policies forbids nothing"
    return Policies(documents)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ranks_reach_each_other_on_any_port_and_steps_reach_what_they_need(overlay: str) -> None:
    world = policies(overlay)
    for port in (29400, 29500, 41001, 65000):  # rendezvous, and the ports that gloo and NCCL choose
        assert world.allow(RANK, PEER, port)
    for name, pod in {"rank": RANK, **STEPS}.items():
        assert all(world.allow(pod, names, 53, kind) for names in (DNS, DNS_CACHE) for kind in ("UDP", "TCP")), name
        assert world.allow(pod, S3, 443), name
    for name, pod in STEPS.items():
        assert world.allow(pod, MLFLOW, 5000), name
        assert world.allow(pod, API_SERVER, 6443) and world.allow(pod, API_SERVER, 443), name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_service_of_the_overlay_takes_the_steps_and_its_own_clients_get_out(overlay: str) -> None:
    """Each service of the overlay that steps or ranks use, at the port of its container."""
    world, objects = policies(overlay), render(overlay)
    for service in (document for document in objects if document["kind"] == "Service"):
        selector, name = service["spec"]["selector"], service["metadata"]["name"]
        (pod,) = (
            document["spec"]["template"]
            for document in objects
            if document["kind"] in ("Deployment", "StatefulSet")
            and selector.items() <= document["spec"]["template"]["metadata"]["labels"].items()
        )
        ports = {
            port["name"]: port["containerPort"]
            for container in pod["spec"]["containers"]
            for port in container.get("ports", [])
        }
        target = Pod(OURS, pod["metadata"]["labels"], ports)
        for entry in service["spec"]["ports"]:
            port = ports.get(entry["targetPort"], entry["targetPort"])
            for step, source in STEPS.items():
                assert world.allow(source, target, port), f"{step} to {name}:{port}"
            assert not world.allow(STRANGER, target, port, blocks_reach_pods=True), f"anybody to {name}:{port}"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ranks_accept_no_other_pods_and_reach_no_other_pods(overlay: str) -> None:
    world = policies(overlay)
    others = (STRANGER, NEIGHBOUR, *STEPS.values())
    for other, port in itertools.product(others, (22, 29400, 41001)):
        assert not world.allow(other, RANK, port, blocks_reach_pods=True), (other, port)
        assert not world.allow(RANK, other, port, blocks_reach_pods=True), (other, port)
    for port in (22, 25, 80, 3306, 29400):
        assert not world.allow(RANK, INTERNET, port), port
    for target in (NEIGHBOUR, MLFLOW, *STEPS.values()):
        assert not world.allow(STRANGER, target, 8080, blocks_reach_pods=True), target
    assert not world.allow(RANK, DNS, 8080)
    assert not world.allow(STEPS["train"], Pod("kube-system", {}), 10250, blocks_reach_pods=True)


def test_the_network_policy_checker_follows_the_rules_of_kubernetes() -> None:
    a, b = Pod("a", {"x": "1"}), Pod("b", {"x": "2"})
    assert Policies([]).allow(a, b, 1)  # without a policy, everything is allowed

    def policy(**spec: object) -> dict[str, object]:
        return {"metadata": {"namespace": "a"}, "spec": {"podSelector": {}, **spec}}

    ingress = policy(ingress=[{"from": [{"podSelector": {}}]}])
    assert Policies([ingress]).allow(a, b, 1)  # without policyTypes and egress, it applies to ingress only
    assert not Policies([ingress]).allow(b, a, 1)  # a bare podSelector selects in the policy's own namespace
    open_door = policy(ingress=[{"from": [{"podSelector": {}}, {"namespaceSelector": {}}]}])
    assert Policies([open_door]).allow(b, a, 1)
    namespace_and_pod = policy(
        ingress=[{"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"x": "3"}}}]}]
    )
    assert not Policies([namespace_and_pod]).allow(b, a, 1)  # within one peer, both must match
    ports = policy(policyTypes=["Egress"], egress=[{"ports": [{"port": 10, "endPort": 20}]}])
    assert [Policies([ports]).allow(a, b, port) for port in (9, 10, 20, 21)] == [False, True, True, False]
    block = policy(
        policyTypes=["Egress"], egress=[{"to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8"]}}]}]
    )
    assert Policies([block]).allow(a, Outside("1.1.1.1"), 1)
    assert not Policies([block]).allow(a, Outside("10.1.1.1"), 1)
    assert not Policies([block]).allow(a, Pod("b", {}, address="11.0.0.1"), 1)
    assert Policies([block]).allow(a, Pod("b", {}, address="11.0.0.1"), 1, blocks_reach_pods=True)
    named_port = policy(ingress=[{"ports": [{"port": "http"}]}])
    assert Policies([named_port]).allow(b, Pod("a", {}, {"http": 80}), 80)
    assert not Policies([named_port]).allow(b, Pod("a", {}, {"http": 80}), 81)
    assert not Policies([named_port, policy()]).allow(b, a, 1) and Policies([named_port, open_door]).allow(b, a, 1)


def test_the_clouds_identities_are_reached_where_the_component_is_and_nowhere_else() -> None:
    for overlay in OVERLAYS:
        is_allowed = "workload-identity" in {document["metadata"]["name"] for document in render(overlay)}
        for (address, port), pod in itertools.product(IDENTITY.items(), (RANK, MLFLOW, *STEPS.values())):
            assert policies(overlay).allow(pod, Outside(address), port) == is_allowed, (overlay, address, pod)
        assert not policies(overlay).allow(NEIGHBOUR, Outside("169.254.169.254"), 80)
    assert "workload-identity" in {document["metadata"]["name"] for document in render("production")}


def test_events_pass_over_the_bus_from_the_queue_to_the_workflow_and_the_database_is_mlflow_s_alone() -> None:
    world = policies("production")
    bus, other, source, sensor = (
        Pod(OURS, {"app.kubernetes.io/name": name}) for name in ("event-bus", "event-bus", "event-source", "sensor")
    )
    assert world.allow(bus, other, 6222) and world.allow(bus, other, 8222)  # members of the bus
    assert world.allow(source, bus, 4222) and world.allow(sensor, bus, 4222)
    # The queue, and the creation of the Workflow.
    assert world.allow(source, S3, 443) and world.allow(sensor, API_SERVER, 6443)
    assert not world.allow(RANK, bus, 4222) and not world.allow(STRANGER, bus, 4222, blocks_reach_pods=True)
    database = Outside("10.1.2.3")
    assert world.allow(MLFLOW, database, 5432) and not world.allow(RANK, database, 5432)


def profile_clients() -> dict[str, object]:
    """The policy of the component that admits one named profile to Holdfast's namespace."""
    policy = yaml.safe_load((MANIFESTS / "components/profile-clients/network-policy.yaml").read_text())
    policy["metadata"]["namespace"] = OURS
    return dict(policy)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_other_namespace_reaches_mlflow_or_the_store_until_an_overlay_names_it(overlay: str) -> None:
    closed = policies(overlay)
    opened = Policies([*(item for item in render(overlay) if item["kind"] == "NetworkPolicy"), profile_clients()],
                      NAMESPACES)  # fmt: skip
    store = Pod(OURS, {"app.kubernetes.io/name": "s3"})
    labels = {"app.kubernetes.io/name": "holdfast"}
    for target, port in ((MLFLOW, 5000), (store, 8333)):
        for namespace in (PROFILE_NAMESPACE, "kubeflow", "another-profile"):
            labelled = Pod(namespace, labels)  # any user can set these labels
            assert not closed.allow(labelled, target, port, blocks_reach_pods=True)
            assert opened.allow(labelled, target, port) == (namespace == PROFILE_NAMESPACE)
        assert not opened.allow(Pod(PROFILE_NAMESPACE, {"app": "notebook"}), target, port)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_in_a_profile_steps_reach_kubeflow_and_mlflow_beyond_it_and_ranks_only_each_other(overlay: str) -> None:
    documents = [document for document in [*render(PROFILE), *render(overlay)] if document["kind"] == "NetworkPolicy"]
    world = Policies([*documents, profile_clients()], NAMESPACES)
    steps = {name: replace(pod, namespace=PROFILE_NAMESPACE) for name, pod in STEPS.items()}
    rank, peer = (replace(pod, namespace=PROFILE_NAMESPACE) for pod in (RANK, PEER))
    for name, pod in steps.items():
        for service, (target, ports) in KFP.items():
            assert all(world.allow(pod, target, port) for port in ports), f"{name} to {service}"
        assert world.allow(pod, MLFLOW, 5000), name
        assert world.allow(pod, API_SERVER, 6443) and world.allow(pod, S3, 443) and world.allow(pod, DNS, 53, "UDP")
        assert world.allow(pod, DNS_CACHE, 53, "UDP"), name
        assert not world.allow(pod, INTERNET, 22) and not world.allow(pod, STRANGER, 5432, blocks_reach_pods=True)
    for port in (29400, 41001):
        assert world.allow(rank, peer, port)
        assert not world.allow(replace(NEIGHBOUR, namespace=PROFILE_NAMESPACE), rank, port, blocks_reach_pods=True)
        assert not world.allow(RANK, rank, port, blocks_reach_pods=True)
    notebook = Pod(PROFILE_NAMESPACE, {"app": "notebook"})
    assert world.allow(notebook, INTERNET, 8080)  # other pods keep their access
