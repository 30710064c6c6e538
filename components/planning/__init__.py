"""What fits, how fast, how long and for how much, before an accelerator is paid for.

Arithmetic alone: memory of a rank term by term, communication by the alpha-beta model, pipeline schedules, and a search
over layouts. Needs neither torch nor an accelerator. What it was checked against, and how far off it is, stands in
docs/planner.md. Leaves drawing to `pipelines.view`.
"""

from holdfast.components.planning.hardware import ACCELERATORS, Accelerator, accelerator
from holdfast.components.planning.layout import Layout
from holdfast.components.planning.memory import Memory, Updates, memory, practice_here
from holdfast.components.planning.outlook import Outlook, outlook
from holdfast.components.planning.search import Candidate, Found, Task, reasons, search
from holdfast.components.planning.shape import Architecture
from holdfast.components.planning.speed import Speed, speed
from holdfast.components.planning.spot import Spot, spot

__all__ = [
    "ACCELERATORS",
    "Accelerator",
    "Architecture",
    "Candidate",
    "Found",
    "Layout",
    "Memory",
    "Outlook",
    "Speed",
    "Spot",
    "Task",
    "Updates",
    "accelerator",
    "memory",
    "outlook",
    "practice_here",
    "reasons",
    "search",
    "speed",
    "spot",
]
