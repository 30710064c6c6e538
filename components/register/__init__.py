"""The register step: a blessed model becomes a version of a registered model in MLflow, with its whole lineage."""

from holdfast.components.register.registration import NotBlessedError, Registration, registration_key, run

__all__ = ["NotBlessedError", "Registration", "registration_key", "run"]
