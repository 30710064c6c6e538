"""Node health check of a gang: measures each rank in seconds and compares it with its peers, before a run starts.

`examine` probes every rank of a gang and makes one `Report`, the same on all of them. `judge` is its arithmetic.
Neither `judge` nor this module imports torch. The launchers decide which nodes the next launch excludes.
"""

from holdfast.health.verdict import Finding, Link, Measured, Report, judge

__all__ = ["Finding", "Link", "Measured", "Report", "judge"]
