"""The objects of a real API server, with the interface of `tests.cluster.objects`. Reads come from mirrors that
watches keep. Writes go to the server: statuses through their subresource, pods to nodes as bindings."""

import copy
import threading
from typing import Self

from tests.cluster.client import VERSIONS, Client, path_of
from tests.cluster.objects import CLUSTER_SCOPED, NAMESPACE, Edit, Object, StatusError, Table, key_of

MIRRORED = ("pods", "leases", "workflows", "pytorchjobs", "trainjobs", "trainingruntimes", "jobs", "nodes",
            "namespaces", "resourcequotas", "configmaps")  # fmt: skip
KINDS = {
    "pods": "Pod", "leases": "Lease", "workflows": "Workflow", "pytorchjobs": "PyTorchJob", "trainjobs": "TrainJob",
    "trainingruntimes": "TrainingRuntime", "jobs": "Job", "nodes": "Node", "namespaces": "Namespace",
    "resourcequotas": "ResourceQuota", "limitranges": "LimitRange", "serviceaccounts": "ServiceAccount",
    "configmaps": "ConfigMap", "secrets": "Secret", "events": "Event", "services": "Service",
}  # fmt: skip
PLURALS = {kind: plural for plural, kind in KINDS.items()}
NO_STATUS = frozenset({"leases", "configmaps", "events", "serviceaccounts", "limitranges", "workflows"})


class ServerObjects(Table):
    """`with ServerObjects(client) as objects`: see `tests.cluster.objects.Objects`. The client is an administrator."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self.client = client
        self._gone: set[str] = set()  # uids of deleted objects
        self._closing = threading.Event()

    def __enter__(self) -> Self:
        for plural in MIRRORED:
            version = self._list(plural)
            threading.Thread(target=self._follow, args=(plural, version), daemon=True, name=f"mirror {plural}").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()

    def all(self, plural: str, namespace: str | None = None) -> list[Object]:
        if plural not in MIRRORED:
            return self.client.list(plural, namespace)[0]
        return super().all(plural, namespace)

    def get(self, plural: str, name: str, namespace: str = NAMESPACE) -> Object | None:
        if plural not in MIRRORED:
            return self.client.get(plural, name, namespace)
        return super().get(plural, name, namespace)

    def create(self, plural: str, body: Object) -> Object:
        body = copy.deepcopy(body)
        body.setdefault("apiVersion", VERSIONS[plural].partition("/")[2])
        body.setdefault("kind", KINDS[plural])
        namespace = body["metadata"].get("namespace", NAMESPACE)
        if plural not in CLUSTER_SCOPED:
            body["metadata"]["namespace"] = namespace
        answer = self.client.request("POST", path_of(plural, namespace), body)
        if "status" in body and plural not in NO_STATUS:
            answer["status"] = body["status"]
            answer = self.client.request(
                "PUT", path_of(plural, namespace, answer["metadata"]["name"], "status"), answer
            )
        self._note(plural, answer)
        return answer

    def change(
        self, plural: str, name: str, edit: Edit, uid: str | None = None, namespace: str = NAMESPACE
    ) -> Object | None:
        body = self.get(plural, name, namespace)
        while body is not None and uid in (None, body["metadata"]["uid"]):
            fresh = copy.deepcopy(body)
            edit(fresh)
            try:
                return self._write(plural, body, fresh)
            except StatusError as error:
                if error.code == 404:
                    return None
                if error.code != 409:
                    raise
            body = self.client.get(plural, name, namespace)
        return None

    def delete(
        self, plural: str, name: str, uid: str | None = None, foreground: bool = False, namespace: str = NAMESPACE
    ) -> None:
        options: Object = {"propagationPolicy": "Foreground" if foreground else "Background"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        self._deleted(plural, self.client.delete(plural, name, namespace, **options))

    def remove(self, plural: str, name: str, namespace: str = NAMESPACE) -> None:
        body = self.get(plural, name, namespace)
        if body is None:
            return
        uid = body["metadata"]["uid"]
        try:
            if body["metadata"].get("finalizers"):
                self.client.patch(plural, name, {"metadata": {"finalizers": None}}, namespace)
            self.client.delete(plural, name, namespace, gracePeriodSeconds=0, preconditions={"uid": uid})
        except StatusError as error:
            if error.code not in (404, 409):
                raise
        self._note(plural, body, deleted=True)

    def knows(self, reference: Object, namespace: str) -> bool:
        """Whether the owner that an object of `namespace` names exists, as the garbage collector checks it."""
        if super().knows(reference, namespace) or reference["kind"] not in PLURALS:
            return True
        body = self.client.get(PLURALS[reference["kind"]], reference["name"], namespace)
        return body is not None and body["metadata"]["uid"] == reference["uid"]

    def _write(self, plural: str, found: Object, fresh: Object) -> Object:
        name, namespace = found["metadata"]["name"], found["metadata"].get("namespace")
        node = fresh.get("spec", {}).get("nodeName")
        if plural == "pods" and node and not found["spec"].get("nodeName"):
            target = {"apiVersion": "v1", "kind": "Node", "name": node}
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
            self.client.request("POST", path_of(plural, namespace, name, "binding"), binding)
            found = self.client.get(plural, name, namespace) or found
            self._note(plural, found)
            return found
        without = [{key: value for key, value in body.items() if key != "status"} for body in (found, fresh)]
        if without[0] != without[1] or (plural in NO_STATUS and found != fresh):
            status = fresh.get("status")
            found = self.client.request("PUT", path_of(plural, namespace, name), fresh)
            fresh = {**found, "status": status} if status is not None else found
        if fresh.get("status") != found.get("status") and plural not in NO_STATUS:
            found = self.client.request("PUT", path_of(plural, namespace, name, "status"), fresh)
        self._note(plural, found)
        return found

    def _deleted(self, plural: str, answer: Object) -> None:
        """What the server answers to a deletion: the object, while it waits for its end, or that it is gone."""
        if answer.get("kind") == "Status":
            return  # the watch reports it
        is_kept = answer["metadata"].get("finalizers") or (plural == "pods" and answer["spec"].get("nodeName"))
        if is_kept:
            self._note(plural, answer)

    def _list(self, plural: str) -> str:
        items, version = self.client.list(plural)
        for item in items:
            self._note(plural, item)
        uids = {item["metadata"]["uid"] for item in items}
        with self.changed:
            missed = [
                body
                for (kind, *_), body in self._objects.items()
                if kind == plural and body["metadata"]["uid"] not in uids
            ]
        for body in missed:
            if self.client.get(plural, body["metadata"]["name"], body["metadata"].get("namespace")) is None:
                self._note(plural, body, deleted=True)
        return version

    def _follow(self, plural: str, version: str) -> None:
        while not self._closing.is_set():
            try:
                version = version or self._list(plural)
                if not version:  # a kind that the server does not know
                    return
                for kind, body in self.client.watch(plural, version):
                    version = body["metadata"]["resourceVersion"]
                    if kind != "BOOKMARK":
                        self._note(plural, body, deleted=kind == "DELETED")
            except StatusError:
                version = ""
                self._closing.wait(0.2)

    def _note(self, plural: str, found: Object, *, deleted: bool = False) -> None:
        metadata = found["metadata"]
        key = key_of(plural, metadata.get("namespace", ""), metadata["name"])
        with self.changed:
            entry = self._objects.get(key)
            if entry is not None and entry["metadata"]["uid"] == metadata["uid"]:
                if not deleted and int(metadata["resourceVersion"]) <= int(entry["metadata"]["resourceVersion"]):
                    return
            elif deleted or metadata["uid"] in self._gone:
                self._gone.add(metadata["uid"])
                return
            if deleted:
                self._gone.add(metadata["uid"])
                del self._objects[key]
            else:
                self._objects[key] = copy.deepcopy(found)
            self.version += 1
            self.changed.notify_all()
