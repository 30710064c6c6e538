"""A real etcd and kube-apiserver with the official CRDs, as in envtest: binaries from KUBEBUILDER_ASSETS.

No controller runs: none creates pods or completes a foreground deletion. `finish_deletions` does the latter.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from kubernetes.client import Configuration

from holdfast.launch.kubernetes.client import Api
from holdfast.launch.kubernetes.schemas import FOLDER as CRDS
from tests.ports import free_port

NAMESPACE = "training"
ADMIN, LAUNCHER = "admin-token", "launcher-token"
START_SECONDS = 120.0
MANIFESTS = Path(__file__).parents[2] / "manifests"
LAUNCHER_ROLE = "holdfast-launcher"


def assets() -> Path | None:
    """The folder of the binaries, if it has all of them."""
    folder = Path(os.environ.get("KUBEBUILDER_ASSETS") or "/nonexistent")
    return folder if all((folder / name).exists() for name in ("etcd", "kube-apiserver", "kubectl")) else None


needs_assets = pytest.mark.skipif(
    assets() is None,
    reason="needs etcd, kube-apiserver and kubectl in KUBEBUILDER_ASSETS (setup-envtest use -p path)",
)


@contextmanager
def start_control_plane(folder: Path, *, accounts: bool = False) -> Iterator[ControlPlane]:
    """A control plane on which the launcher's service account has exactly the role of the manifests."""
    binaries = assets()
    assert binaries is not None
    with ControlPlane(binaries, folder, accounts=accounts) as plane:
        plane.kubectl("apply", "-f", "-", text=yaml.safe_dump_all(launcher_role()))
        yield plane


def until(plane: ControlPlane, check: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait until a condition holds: a test gets no notice of this server's changes."""
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, f"it did not come true within {seconds:.0f} s\n{plane.tails()}"
        time.sleep(0.2)


def launcher_role() -> list[dict[str, Any]]:
    """What the manifests grant to the launcher, in the namespace of these tests."""
    metadata = {"name": LAUNCHER_ROLE, "namespace": NAMESPACE}
    role = yaml.safe_load((MANIFESTS / "components" / "launcher" / "role.yaml").read_text())
    binding = {
        "apiVersion": role["apiVersion"],
        "kind": "RoleBinding",
        "metadata": metadata,
        "subjects": [{"kind": "ServiceAccount", **metadata}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role["metadata"]["name"]},
    }
    return [{**role, "metadata": {**role["metadata"], "namespace": NAMESPACE}}, binding]


class ControlPlane:
    """`with ControlPlane(binaries, folder) as plane`: a running API server that knows the CRDs and one namespace."""

    def __init__(self, binaries: Path, folder: Path, *, accounts: bool = False) -> None:
        """With `accounts` a pod's service account must exist, as on every cluster; no controller creates one."""
        self._binaries, self._folder, self._accounts = binaries, folder, accounts
        self._processes: list[subprocess.Popen[bytes]] = []
        self.url = ""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def certificate(self) -> Path:
        """The server's certificates from its first start: its own, and the one that signed it."""
        return self._folder / "certificates" / "apiserver.crt"

    def configuration(self, token: str = LAUNCHER) -> Configuration:
        """Configuration of the `kubernetes` package for one of the server's users."""
        configuration = Configuration(host=self.url)
        configuration.ssl_ca_cert = str(self.certificate)
        configuration.api_key["authorization"] = f"Bearer {token}"
        return configuration

    def api(self, token: str = LAUNCHER) -> Api:
        """A client with a token."""
        return Api(lambda: self.configuration(token), NAMESPACE, patience=30.0)

    def install(self, *definitions: dict[str, Any]) -> None:
        """Add kinds to the server."""
        for definition in definitions:
            self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", text=json.dumps(definition))
        until(self, self._kinds_are_established)  # `kubectl wait` fails at a kind that has no conditions yet

    def _kinds_are_established(self) -> bool:
        items = json.loads(self.kubectl("get", "crd", "-o", "json"))["items"]
        conditions = [item.get("status", {}).get("conditions") or [] for item in items]
        return all(any(each["type"] == "Established" and each["status"] == "True" for each in of) for of in conditions)

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Context in which the API server is away: killed, and started again over the same etcd."""
        server = self._processes.pop()
        server.kill()
        server.wait()
        try:
            yield
        finally:
            self._spawn(*self._server)
            self._wait_until_ready()

    def kubectl(self, *arguments: str, text: str | None = None) -> str:
        """Run kubectl as an administrator and return its output. Fails the test when it fails."""
        result = self._kubectl(arguments, text)
        words = f"kubectl {' '.join(arguments)}\n{result.stdout}\n{result.stderr}"
        assert result.returncode == 0, f"{words}\n{self.tails()}"
        return result.stdout

    def refusal(self, *arguments: str, text: str | None = None) -> str:
        """What kubectl reports as an error of the server; empty if the server accepts the command."""
        result = self._kubectl(arguments, text)
        assert (result.returncode != 0) == bool(result.stderr), result.stderr
        return result.stderr

    def _kubectl(self, arguments: tuple[str, ...], text: str | None) -> subprocess.CompletedProcess[str]:
        command = [str(self._binaries / "kubectl"), f"--server={self.url}", f"--token={ADMIN}"]
        command += ["--insecure-skip-tls-verify=true", f"--cache-dir={self._folder / 'cache'}", *arguments]
        return subprocess.run(
            command, input=text, capture_output=True, text=True, check=False, env={"HOME": str(self._folder)}
        )

    def tails(self) -> str:
        """The ends of the logs, and the processes that have ended: for messages."""
        dead = [str(process.args[0]) for process in self._processes if process.poll() is not None]  # type: ignore[index]
        logs = [f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in self._folder.glob("*.log")]
        return "\n".join([f"ended: {', '.join(dead) or 'nobody'}", *logs])

    def say(self, resource: str, name: str, status: dict[str, Any]) -> None:
        """Write an object's status, as its controller would."""
        patch = json.dumps({"status": status})
        self.kubectl(
            "patch", resource, name, "-n", NAMESPACE, "--subresource=status", "--type=merge", f"--patch={patch}"
        )

    def finish_deletions(self, resource: str) -> None:
        """Complete the deletion of objects that wait for the garbage collector."""
        for item in json.loads(self.kubectl("get", resource, "-n", NAMESPACE, "-o", "json"))["items"]:
            if item["metadata"].get("deletionTimestamp"):
                patch = json.dumps({"metadata": {"finalizers": None}})
                name = item["metadata"]["name"]
                self.kubectl("patch", resource, name, "-n", NAMESPACE, "--type=merge", f"--patch={patch}")

    def served_groups(self) -> set[str]:
        """The API groups that the server knows, the core one as an empty name."""
        return {"", *(group["name"] for group in json.loads(self.kubectl("get", "--raw", "/apis"))["groups"])}

    def _start(self) -> None:
        client, peer, port = free_port(), free_port(), free_port()
        etcd = f"http://127.0.0.1:{client}"
        self._spawn(
            "etcd", f"--data-dir={self._folder / 'etcd'}", f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}", f"--listen-peer-urls=http://127.0.0.1:{peer}", "--unsafe-no-fsync=true",
        )  # fmt: skip
        tokens = self._folder / "tokens.csv"
        tokens.write_text(
            f'{ADMIN},admin,1,"system:masters"\n{LAUNCHER},system:serviceaccount:{NAMESPACE}:{LAUNCHER_ROLE},2\n'
        )
        key = self._folder / "service-account.key"
        key.write_bytes(
            rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        self.url = f"https://127.0.0.1:{port}"
        self._server = (
            "kube-apiserver", f"--etcd-servers={etcd}", f"--cert-dir={self._folder / 'certificates'}",
            "--bind-address=127.0.0.1", f"--secure-port={port}", "--service-cluster-ip-range=10.0.0.0/24",
            "--authorization-mode=RBAC", *([] if self._accounts else ["--disable-admission-plugins=ServiceAccount"]),
            f"--token-auth-file={tokens}",
            f"--service-account-issuer={self.url}/", f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}", "--allow-privileged=true",
        )  # fmt: skip
        self._spawn(*self._server)
        self._wait_until_ready()
        self.install(*(definition for path in sorted(CRDS.glob("*.yaml")) for definition in _definitions(path)))
        self.kubectl("create", "namespace", NAMESPACE)
        if self._accounts:
            self.kubectl("create", "serviceaccount", "default", "-n", NAMESPACE)

    def _spawn(self, name: str, *arguments: str) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes.append(
                subprocess.Popen([str(self._binaries / name), *arguments], stdout=log, stderr=subprocess.STDOUT)
            )

    def _wait_until_ready(self) -> None:
        context = ssl._create_unverified_context()
        request = urllib.request.Request(f"{self.url}/readyz", headers={"Authorization": f"Bearer {ADMIN}"})
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(request, timeout=5, context=context):
                    return
            except OSError as error:
                dead = [process.args for process in self._processes if process.poll() is not None]
                if dead or time.monotonic() > end:
                    raise AssertionError(f"the API server did not start ({error})\n{self.tails()}") from error
                time.sleep(0.2)


def _definitions(path: Path) -> Iterator[dict[str, Any]]:
    """The CRDs of a file without their conversion webhooks, since nothing answers those."""
    for definition in yaml.load_all(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if not definition or definition.get("kind") != "CustomResourceDefinition":
            continue
        definition["spec"].pop("conversion", None)
        definition.get("metadata", {}).get("annotations", {}).pop("cert-manager.io/inject-ca-from", None)
        definition.pop("status", None)
        yield definition
