"""The spec: one file that describes a training run, checked before anything is spent.

`load_spec` reads it, and `run_id` identifies the run. `ExitCode` and the exceptions are the ways in which a process may
end.
"""

from holdfast.spec.errors import ExitCode, HoldfastError, Problem, SpecError
from holdfast.spec.identity import DATA_PLANE_VERSION, digest, run_id
from holdfast.spec.load import dump_spec, load_spec, parse_spec
from holdfast.spec.tree import SPEC_VERSION, Spec

__all__ = [
    "DATA_PLANE_VERSION",
    "SPEC_VERSION",
    "ExitCode",
    "HoldfastError",
    "Problem",
    "Spec",
    "SpecError",
    "digest",
    "dump_spec",
    "load_spec",
    "parse_spec",
    "run_id",
]
