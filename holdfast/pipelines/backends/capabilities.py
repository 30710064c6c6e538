"""What each backend can do. Callers ask for a capability, and never compare the name of a backend."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do, beyond the `Backend` protocol, which every backend fulfills."""

    sweeps: bool = False  # runs the DAG of a sweep
    searches: bool = False  # runs the trials of a search that depend on results: tpe, asha
    limited_trials: bool = False  # limits the concurrent trials of a sweep to a number
    foreground: bool = False  # `submit` runs the steps on this machine, shows the progress, and returns at the end
    images: bool = False  # takes the image and the service account of the steps from the request
    endpoints: bool = False  # has an address that a request can name
    contexts: bool = False  # its address is a context of the kubeconfig
    namespaces: bool = False  # has namespaces that a request can name
    kubernetes: bool = False  # its objects are Kubernetes' or belong to a cluster's pods
    own_account: bool = False  # the engine gives its pods a separate service account
    shared_folders: bool = False  # its machines see the folders of the submitting machine under the same paths
    shared_volumes: bool = False  # its machines see `cluster.volumes` like the submitting machine


LOCAL = Capabilities(sweeps=True, searches=True, foreground=True, shared_folders=True)
SSH = Capabilities(foreground=True, endpoints=True, shared_folders=True)
KUBEFLOW = Capabilities(
    sweeps=True,
    searches=True,
    images=True,
    endpoints=True,
    namespaces=True,
    kubernetes=True,
    own_account=True,
)
ARGO = Capabilities(
    sweeps=True,
    searches=True,
    limited_trials=True,
    images=True,
    endpoints=True,
    contexts=True,
    namespaces=True,
    kubernetes=True,
)
SLURM = Capabilities(sweeps=True, searches=True, limited_trials=True, shared_folders=True)
RAY = Capabilities(searches=True, endpoints=True, shared_volumes=True)
