"""`holdfast doctor`: looks at a cluster, the store and MLflow for what a run would miss, before a run misses it.

Promises one finding for each thing, with the command that mends it; that it looks at the very cluster that a launcher
started here would use; and that it changes nothing but one small object of its own in the store, which it removes. What
it may not look at is a warning. Leaves the mending to a person.
"""

from holdfast.pipelines.doctor.examine import examine
from holdfast.pipelines.doctor.findings import Finding, as_json, exit_code, print_findings

__all__ = ["Finding", "as_json", "examine", "exit_code", "print_findings"]
