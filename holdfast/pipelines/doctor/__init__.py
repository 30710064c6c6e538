"""`holdfast doctor`: checks a cluster, the store and MLflow for everything that a run needs.

Each check gives one finding with the command that fixes it. It checks the same cluster that a launcher started here
would use. It writes only one small object to the store and removes it. What it has no right to read is a warning. A
person makes the fixes.
"""

from holdfast.pipelines.doctor.examine import examine
from holdfast.pipelines.doctor.findings import Finding, as_json, exit_code, print_findings

__all__ = ["Finding", "as_json", "examine", "exit_code", "print_findings"]
