"""Whether network policies allow a connection from a pod to another pod or an address: Kubernetes' rules, over rendered
manifests.

If a policy selects a pod for a direction, the pod may do only what one of those policies allows. Both ends must allow
it. Kubernetes does not define whether an `ipBlock` reaches pods. A required flow must not depend on it, and a forbidden
flow must stay forbidden with it. `blocks_reach_pods` is for that.
"""

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """A pod, as policies see it. `ports` can give names to its ports."""

    namespace: str
    labels: Mapping[str, str]
    ports: Mapping[str, int] = field(default_factory=dict)
    address: str = "10.244.7.7"


@dataclass(frozen=True)
class Outside:
    """An address outside all pods."""

    address: str


End = Pod | Outside


@dataclass(frozen=True)
class Policies:
    """The policies of a cluster. `namespaces`: their labels, in addition to the name label that each one has."""

    policies: Sequence[Object]
    namespaces: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def allow(
        self, source: End, target: End, port: int, protocol: str = "TCP", *, blocks_reach_pods: bool = False
    ) -> bool:
        """Whether a connection from `source` to a port of `target` is allowed."""
        out = self._allowed("egress", source, target, port, protocol, target, blocks_reach_pods)
        return out and self._allowed("ingress", target, source, port, protocol, target, blocks_reach_pods)

    def _allowed(
        self, direction: str, subject: End, peer: End, port: int, protocol: str, target: End, blocks: bool
    ) -> bool:
        if isinstance(subject, Outside):
            return True
        applying = list(self._applying(direction, subject))
        return not applying or any(
            _port_matches(rule.get("ports"), port, protocol, target)
            and self._peer_matches(rule.get("from" if direction == "ingress" else "to"), peer, subject, blocks)
            for policy in applying
            for rule in policy["spec"].get(direction) or []
        )

    def _applying(self, direction: str, pod: Pod) -> Iterator[Object]:
        for policy in self.policies:
            spec = policy["spec"]
            kinds = spec.get("policyTypes") or (["Ingress", "Egress"] if "egress" in spec else ["Ingress"])
            same_namespace = policy["metadata"].get("namespace") == pod.namespace
            if same_namespace and direction.capitalize() in kinds and selects(spec.get("podSelector"), pod.labels):
                yield policy

    def _peer_matches(self, peers: Sequence[Object] | None, peer: End, subject: Pod, blocks: bool) -> bool:
        if not peers:
            return True  # a rule without peers applies to all
        return any(self._one_matches(pod, peer, subject, blocks) for pod in peers)

    def _one_matches(self, each: Object, peer: End, subject: Pod, blocks: bool) -> bool:
        if "ipBlock" in each:
            return (isinstance(peer, Outside) or blocks) and _in_block(each["ipBlock"], peer.address)
        if isinstance(peer, Outside):
            return False
        if "namespaceSelector" in each:
            labels = {"kubernetes.io/metadata.name": peer.namespace, **self.namespaces.get(peer.namespace, {})}
            if not selects(each["namespaceSelector"], labels):
                return False
        elif peer.namespace != subject.namespace:
            return False
        return selects(each.get("podSelector"), peer.labels)


def selects(selector: Object | None, labels: Mapping[str, str]) -> bool:
    """Whether a label selector matches. An empty one matches everything."""
    selector = selector or {}
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(_holds(expression, labels) for expression in selector.get("matchExpressions") or [])


def _holds(expression: Object, labels: Mapping[str, str]) -> bool:
    key, operator = expression["key"], expression["operator"]
    if operator in ("Exists", "DoesNotExist"):
        return (key in labels) == (operator == "Exists")
    if operator == "In":
        return labels.get(key) in expression["values"]
    assert operator == "NotIn", operator
    return labels.get(key) not in expression["values"]


def _in_block(block: Object, address: str) -> bool:
    ip = ipaddress.ip_address(address)

    def within(cidr: str) -> bool:
        network = ipaddress.ip_network(cidr)
        return network.version == ip.version and ip in network

    return within(block["cidr"]) and not any(within(cidr) for cidr in block.get("except") or [])


def _port_matches(ports: Sequence[Object] | None, port: int, protocol: str, target: End) -> bool:
    if not ports:
        return True
    return any(
        port_rule.get("protocol", "TCP") == protocol
        and _in_range(port_rule, port, target if isinstance(target, Pod) else None)
        for port_rule in ports
    )


def _in_range(each: Object, port: int, target: Pod | None) -> bool:
    first: Any = each.get("port")
    if first is None:
        return True
    if isinstance(first, str):
        return target is not None and target.ports.get(first) == port
    return bool(first <= port <= each.get("endPort", first))
