"""A real etcd and kube-apiserver with the official CRDs, as envtest does it: binaries from KUBEBUILDER_ASSETS.

No controller runs: nothing makes pods, and nobody ends a foreground deletion. `finish_deletions` stands in for that.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from kubernetes.client import Configuration

from holdfast.components.launch.kubernetes.client import Api
from tests.kubernetes_schemas import FOLDER as CRDS

NAMESPACE = "training"
ADMIN, LAUNCHER = "admin-token", "launcher-token"
START_SECONDS = 120.0


def assets() -> Path | None:
    """The folder of the binaries, when there is one with all of them."""
    folder = Path(os.environ.get("KUBEBUILDER_ASSETS") or "/nonexistent")
    return folder if all((folder / name).exists() for name in ("etcd", "kube-apiserver", "kubectl")) else None


class ControlPlane:
    """`with ControlPlane(binaries, folder) as plane`: a running API server that knows the CRDs and one namespace."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self._binaries, self._folder = binaries, folder
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

    def api(self, token: str = LAUNCHER) -> Api:
        """A client with a token."""

        def configure() -> Configuration:
            configuration = Configuration(host=self.url)
            configuration.verify_ssl = False  # the server signs its own certificate
            configuration.api_key["authorization"] = f"Bearer {token}"
            return configuration

        return Api(configure, NAMESPACE, patience=30.0)

    def kubectl(self, *arguments: str, text: str | None = None) -> str:
        """Run kubectl as an administrator; what it prints. Fails the test when it fails."""
        command = [str(self._binaries / "kubectl"), f"--server={self.url}", f"--token={ADMIN}"]
        command += ["--insecure-skip-tls-verify=true", f"--cache-dir={self._folder / 'cache'}", *arguments]
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, check=False, env={"HOME": str(self._folder)}
        )
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def say(self, resource: str, name: str, status: dict[str, Any]) -> None:
        """Write an object's status, as its controller would."""
        patch = json.dumps({"status": status})
        self.kubectl(
            "patch", resource, name, "-n", NAMESPACE, "--subresource=status", "--type=merge", f"--patch={patch}"
        )

    def finish_deletions(self, resource: str) -> None:
        """Let objects go that wait for the garbage collector."""
        for item in json.loads(self.kubectl("get", resource, "-n", NAMESPACE, "-o", "json"))["items"]:
            if item["metadata"].get("deletionTimestamp"):
                patch = json.dumps({"metadata": {"finalizers": None}})
                name = item["metadata"]["name"]
                self.kubectl("patch", resource, name, "-n", NAMESPACE, "--type=merge", f"--patch={patch}")

    def served_groups(self) -> set[str]:
        """The API groups that the server knows, the core one as an empty name."""
        return {"", *(group["name"] for group in json.loads(self.kubectl("get", "--raw", "/apis"))["groups"])}

    def _start(self) -> None:
        client, peer, port = _free_port(), _free_port(), _free_port()
        etcd = f"http://127.0.0.1:{client}"
        self._spawn(
            "etcd", f"--data-dir={self._folder / 'etcd'}", f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}", f"--listen-peer-urls=http://127.0.0.1:{peer}", "--unsafe-no-fsync=true",
        )  # fmt: skip
        tokens = self._folder / "tokens.csv"
        tokens.write_text(
            f'{ADMIN},admin,1,"system:masters"\n{LAUNCHER},system:serviceaccount:{NAMESPACE}:holdfast-launcher,2\n'
        )
        key = self._folder / "service-account.key"
        key.write_bytes(
            rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        self.url = f"https://127.0.0.1:{port}"
        self._spawn(
            "kube-apiserver", f"--etcd-servers={etcd}", f"--cert-dir={self._folder / 'certificates'}",
            "--bind-address=127.0.0.1", f"--secure-port={port}", "--service-cluster-ip-range=10.0.0.0/24",
            "--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount", f"--token-auth-file={tokens}",
            f"--service-account-issuer={self.url}/", f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}", "--allow-privileged=true",
        )  # fmt: skip
        self._wait_until_ready()
        for path in sorted(CRDS.glob("*.yaml")):
            self._install(path)
        self.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
        self.kubectl("create", "namespace", NAMESPACE)

    def _install(self, path: Path) -> None:
        """Install a CRD without its conversion webhook: there is nobody to answer it."""
        for definition in yaml.load_all(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            if not definition or definition.get("kind") != "CustomResourceDefinition":
                continue
            definition["spec"].pop("conversion", None)
            definition.get("metadata", {}).get("annotations", {}).pop("cert-manager.io/inject-ca-from", None)
            definition.pop("status", None)
            self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", text=json.dumps(definition))

    def _spawn(self, name: str, *arguments: str) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
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
                ended = [process.args for process in self._processes if process.poll() is not None]
                if ended or time.monotonic() > end:
                    logs = "\n".join(path.read_text()[-3000:] for path in self._folder.glob("*.log"))
                    raise AssertionError(f"the API server did not start ({error}; ended: {ended})\n{logs}") from error
                time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
