"""Whether the nodes of a gang are sound: measured in seconds, compared with their peers, before a run trusts them.

`examine` probes every rank of a gang and makes one `Report`, the same on all of them; `judge` is its arithmetic, and
knows no torch, nor does this module. Leaves to the launchers which nodes the next launch does without.
"""

from holdfast.health.measured import Finding, Link, Measured, Report
from holdfast.health.verdict import judge

__all__ = ["Finding", "Link", "Measured", "Report", "judge"]
