"""The cluster that the doctor examines."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipelines.doctor.cluster import Cluster, kubeconfig


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    fake_cluster = Cluster()
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, fake_cluster.url)))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", os.environ["KUBECONFIG"])
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("HOLDFAST_STORE", raising=False)
    yield fake_cluster
    fake_cluster.server.shutdown()
    fake_cluster.server.server_close()
