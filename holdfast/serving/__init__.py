"""Services of a registered model outside MLflow: an InferenceService of KServe, a Deployment of vLLM, and an
entry in a Kubeflow Model Registry.

Both follow the champion, also after interrupted and repeated writes: every write states the wanted object, and an
unchanged object stays as it is. `holdfast.tracking` decides which version is the champion.
"""

from holdfast.serving.deployment import deployment
from holdfast.serving.kserve import inference_service
from holdfast.serving.publishing import Published, deployment_of, inference_service_of, publish, settings_of

__all__ = [
    "Published",
    "deployment",
    "deployment_of",
    "inference_service",
    "inference_service_of",
    "publish",
    "settings_of",
]
