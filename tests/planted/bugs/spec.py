"""What could go wrong with spec, identity, and the process side of a step."""

from __future__ import annotations

from tests.planted.bug import Bug

BUGS = [
    Bug(
        "holdfast/spec/identity.py",
        'asked["document_masks"] = spec.data.document_masks',
        "pass",
        "tests/spec",
        "two runs that differ would share an id",
    ),
    Bug("holdfast/spec/identity.py", '"salt": salt', '"salt": ""', "tests/spec", "--fresh would find the old run"),
    Bug(
        "holdfast/spec/section.py",
        'return role or "identity"',
        'return role or "neither"',
        "tests/spec",
        "a forgotten word would drop a field from the identity",
    ),
    Bug(
        "holdfast/spec/rules/training.py",
        "if spec.training.schedule.warmup_steps >= spec.training.steps:",
        "if spec.training.schedule.warmup_steps > spec.training.steps:",
        "tests/spec",
        "a warm-up as long as the run",
    ),
    Bug(
        "holdfast/spec/rules/data.py",
        "if any(weighted) and not all(weighted):",
        "if not any(weighted):",
        "tests/spec",
        "a source without a weight among others",
    ),
    Bug(
        "holdfast/spec/plan.py",
        'if determinism != "off" and not replan:',
        "if not replan and False:",
        "tests/spec tests/train",
        "other software would silently go on with a run that promises bits",
    ),
    Bug(
        "holdfast/spec/plan.py",
        "if segments and segments[-1].fingerprint == plan.fingerprint:\n        return tuple",
        "if segments:\n        return tuple",
        "tests/spec tests/train tests/checkpoint",
        "a change of plan would leave no trace",
    ),
    Bug(
        "holdfast/spec/strict_yaml.py",
        "if key_node.value in seen:",
        "if False:",
        "tests/spec",
        "a key that stands twice",
    ),
    Bug(
        "holdfast/spec/redaction.py",
        "|sas|sig|signature|creds?|key|webhook)$",
        "|sas|sig|creds?|key|webhook)$",
        "tests/runtime/test_secrets.py",
        "AWS writes X-Amz-Signature",
    ),
    Bug(
        "holdfast/runtime/exits.py",
        "return error.exit_code",
        "return ExitCode.UNEXPECTED",
        "tests/runtime",
        "retry policies read the code",
    ),
    Bug(
        "holdfast/steps/adapters.py",
        "lists = [done.result[table.items]] if table.items else []",
        "lists = [[first]] if table.items else []",
        "tests/whole/test_fan_out.py::test_the_tasks_that_kfp_runs_over_a_list_make_the_dataset_of_one",
        "KFP would run over another list than the shares",
    ),
]
