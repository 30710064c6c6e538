"""What becomes of a registered model outside MLflow: a service of KServe, an entry in a Kubeflow Model Registry.

Promises that both follow the champion however often and wherever this is killed and repeated: every write says what is
wanted, and one that is there already changes nothing. Leaves which version is the champion to
`holdfast.tracking`.
"""

from holdfast.serving.kserve import inference_service
from holdfast.serving.publishing import Published, inference_service_of, publish, settings_of

__all__ = ["Published", "inference_service", "inference_service_of", "publish", "settings_of"]
