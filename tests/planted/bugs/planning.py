"""What could go wrong before a run: what a plan says of it, which node is named, and what a policy becomes."""

from __future__ import annotations

from tests.planted.bug import Bug

_VERDICT = "tests/health/test_verdict.py"
_MACHINE = "tests/health/test_machine.py"
_SPOT = "tests/planning/test_spot.py"
_CALIBRATION = "tests/planning/test_calibration.py"
_MEMORY = "tests/planning/test_memory.py"
_AUTO = "tests/planning/test_auto.py"
_COST = "tests/telemetry/test_cost.py"
_AVOIDED = "tests/launch/test_avoided.py"
_ENGINES = "tests/simulation/test_engines.py"
_LAUNCHER = (
    "tests/launch/kubernetes/test_launcher.py::test_pods_avoid_excluded_nodes_prefer_others_to_leaving_ones_and_go_to_no_"
    "labelled_one_where_that_is_asked"
)

BUGS = [
    Bug(
        "holdfast/health/verdict.py",
        'return "failed" if share < self.fails else "warned" if share < self.warns else None',
        'return "warned" if share < self.warns else None',
        _VERDICT,
        "health: no rate would fail a node",
    ),
    Bug(
        "holdfast/health/verdict.py",
        "    usual = median_high(values.values())",
        "    usual = min(values.values())",
        _VERDICT,
        "health: of two ranks neither would be named",
    ),
    Bug(
        "holdfast/health/verdict.py",
        "best[rank] = max(best[rank], link.rate)",
        "best[rank] = link.rate",
        _VERDICT,
        "health: a rank would be judged by its links to slow peers",
    ),
    Bug(
        "holdfast/health/verdict.py",
        "alone = len(told) > 2 and abs(ahead - usual) - error >= CLOCK_FAILS",
        "alone = least >= CLOCK_FAILS",
        _VERDICT,
        "health: a store's wrong clock would fail every node",
    ),
    Bug(
        "holdfast/health/verdict.py",
        "            having = [one for one in having if one.rates[probe]]\n",
        "",
        _VERDICT,
        "health: disks that nothing can be written to would be the measure of the others",
    ),
    Bug(
        "holdfast/health/machine.py",
        'node.rates["store"] = 2 * STORE_BYTES / max(took, 1e-9)',
        'node.rates["store"] = STORE_BYTES / max(took, 1e-9)',
        _MACHINE,
        "health: the rate of a store would be half of what it is",
    ),
    Bug(
        "holdfast/health/machine.py",
        'words = {"yes": 1, "no": 0}',
        'words = {"yes": 0, "no": 1}',
        _MACHINE,
        "health: a failed row remap would be none, and none one",
    ),
    Bug(
        "holdfast/health/machine.py",
        'return ":".join(bus.lower().split(".")[0].split(":")[-2:])',
        'return bus.lower().split(".")[0]',
        _MACHINE,
        "health: an Xid of a domain that is written with four digits would be nobody's",
    ),
    Bug(
        "holdfast/health/machine.py",
        "< XID_SECONDS:",
        "< 1e9:",
        _MACHINE,
        "health: an old fault of a device would fail its node for as long as the machine runs",
    ),
    Bug(
        "holdfast/launch/launches.py",
        'if code == ExitCode.UNHEALTHY_NODE and time.time() - (ending.get("ended") or math.inf) > UNHEALTHY_SECONDS:',
        "if code == ExitCode.UNHEALTHY_NODE and False:",
        _AVOIDED,
        "health: a node that was mended would never come back",
    ),
    Bug(
        "holdfast/launch/launches.py",
        "else max(1, cluster.spares)",
        "else nodes.max",
        _AVOIDED,
        "health: a gang of a fixed size would lose every node that was slow once",
    ),
    Bug(
        "holdfast/launch/emitters/pod.py",
        'nodes["preferredDuringSchedulingIgnoredDuringExecution"] = [rather]',
        "pass",
        _LAUNCHER,
        "health: a machine that a cloud takes back would be taken again where there are others",
    ),
    Bug(
        "holdfast/launch/emitters/pod.py",
        '        avoided.append({"key": HEALTH_LABEL, "operator": "NotIn", "values": [FAILED]})',
        "        pass",
        _LAUNCHER,
        "health: a node that another run has labelled would be taken",
    ),
    Bug(
        "holdfast/launch/kubernetes/launcher.py",
        'if ending.code == ExitCode.UNHEALTHY_NODE and job.cluster.health.on_failure == "label":',
        'if job.cluster.health.on_failure == "label":',
        "tests/launch/kubernetes/test_launcher.py",
        "health: a node would be labelled for a hang",
    ),
    Bug(
        "holdfast/planning/spot.py",
        "sudden, told = (failures, reclaims) if notice",
        "sudden, told = (failures + reclaims, 0.0) if notice",
        _SPOT,
        "planner: a reclaim with a notice would lose half an interval",
    ),
    Bug(
        "holdfast/planning/spot.py",
        "within = [one for one in every if limit is None or one.seconds <= limit]",
        "within = every",
        _SPOT,
        "planner: a mix would be proposed that is not done in time",
    ),
    Bug(
        "holdfast/planning/run_estimate.py",
        "cost = hours * here.price + energy * here.kilowatt_hour",
        "cost = hours * here.price",
        "tests/planning/test_command.py",
        "planner: energy that is paid for apart would be free",
    ),
    Bug(
        "holdfast/planning/search.py",
        "return self.memory.total <= self.task.accelerator.memory * (1 - MARGIN)",
        "return self.memory.total <= self.task.accelerator.memory * (1 + MARGIN)",
        "tests/planning/test_plans.py",
        "planner: layouts would be proposed that do not fit",
    ),
    Bug(
        "holdfast/planning/search.py",
        "        return self.speed.seconds, 10 * cuts + kinds",
        "        return float(10 * cuts + kinds), kinds",
        "tests/planning/test_plans.py",
        "planner: the simplest layout would come before the fastest",
    ),
    Bug(
        "holdfast/planning/calibration.py",
        "        if alpha < 0:\n            alpha, slope = 0.0, b1 / bb",
        "        if alpha < 0:\n            pass",
        _CALIBRATION,
        "planner: a message would take less than no time to begin",
    ),
    Bug(
        "holdfast/planning/collectives.py",
        "        return 2 * steps, 2 * share * size",
        "        return steps, share * size",
        f"{_CALIBRATION} tests/planning/test_collectives.py",
        "planner: a measured all-reduce would have half its rounds and bytes",
    ),
    Bug(
        "holdfast/planning/auto.py",
        "below=LESS * min(failed, on.memory)",
        "below=None",
        _AUTO,
        "planner: what ran out of memory would be proposed again",
    ),
    Bug(
        "holdfast/telemetry/cost.py",
        'seconds = account.total - account.seconds.get("queue", 0.0)',
        "seconds = account.total",
        _COST,
        "cost: hours in a queue would be paid for",
    ),
    Bug(
        "holdfast/telemetry/cost.py",
        "metered=min(1.0, metered / seconds) if seconds else 0.0",
        "metered=1.0 if seconds else 0.0",
        _COST,
        "cost: a part that no meter told would be taken for metered",
    ),
    Bug(
        "holdfast/simulation/engines.py",
        '"queueingStrategy": "StrictFIFO" if policy == "fifo" else "BestEffortFIFO"',
        '"queueingStrategy": "BestEffortFIFO"',
        _ENGINES,
        "policies: jobs would overtake each other under fifo",
    ),
    Bug(
        "holdfast/simulation/engines.py",
        '"value": PRIORITY_STEP * value}',
        '"value": -PRIORITY_STEP * value}',
        _ENGINES,
        "policies: the least important job would come first",
    ),
]
