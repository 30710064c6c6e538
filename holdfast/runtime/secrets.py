"""Redaction of secrets in texts that leave a process: one function for every exit.

`holdfast.spec.redaction` defines what a secret is, and what it guarantees. Error messages use it, too.
"""

from collections.abc import Mapping

from holdfast.spec.redaction import HIDDEN, StreamRedactor, redact, redact_record, secret_values

__all__ = ["HIDDEN", "StreamRedactor", "for_ranks", "redact", "redact_record", "secret_values"]

# For the launcher and the steps, but not for ranks: a rank only needs the credentials of the store.
NOT_FOR_RANKS = frozenset(
    """
    HOLDFAST_WEBHOOK MLFLOW_TRACKING_USERNAME MLFLOW_TRACKING_PASSWORD MLFLOW_TRACKING_TOKEN
    MLFLOW_FLASK_SERVER_SECRET_KEY MLFLOW_BACKEND_STORE_URI KFP_TOKEN KFP_TOKEN_FILE KFP_COOKIE KFP_HEADER
    MODEL_REGISTRY_TOKEN WANDB_API_KEY
    """.split()
)

# The keys that a rank gets of the Secret `holdfast-secrets`, which may have any others: for the store, the Hub and the
# collector of traces.
SITE_KEYS_OF_RANKS = tuple(
    """
    AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AWS_REGION AWS_ENDPOINT_URL
    GOOGLE_SERVICE_ACCOUNT_KEY GOOGLE_BASE_URL AZURE_STORAGE_ACCOUNT_NAME AZURE_STORAGE_ACCOUNT_KEY
    AZURE_STORAGE_SAS_KEY AZURE_STORAGE_ENDPOINT HF_TOKEN
    OTEL_EXPORTER_OTLP_HEADERS OTEL_EXPORTER_OTLP_TRACES_HEADERS
    """.split()
)


def for_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that the processes of a launch inherit. `PET_` variables are arguments of another torchrun, such as
    the one of a Kubeflow pod that this process runs in."""
    return {
        name: value for name, value in environment.items() if name not in NOT_FOR_RANKS and not name.startswith("PET_")
    }
