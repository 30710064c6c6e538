"""Code of a spec: what is refused before anything runs, what is part of which identity, and how its digest travels."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.api.specs import compile_spec
from holdfast.code.resolve import bind, enter_code, is_kept, publish_code, require_known_code
from holdfast.corpus.identity import identify
from holdfast.launch.emitters import training_job
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.backends.slurm.emit import jobs_of
from holdfast.pipelines.paths import load_spec
from holdfast.scoring import settings_key
from holdfast.spec import dump_spec, parse_spec, run_id
from holdfast.spec.engine_text import from_struct, to_struct
from holdfast.spec.errors import DataError, MissingError, SpecError
from holdfast.spec.functions import rank_functions, require_functions
from holdfast.spec.load import written_spec
from holdfast.store import layout, open_store
from tests.code.conftest import MINE, MakeFile

ALL: dict[str, Any] = {
    "training": {"objective": {"use": "mine.py:focal", "gamma": 2.0}},
    "evaluation": {"metrics": [{"use": "mine.py:accuracy", "at_least": 0.1}]},
    "telemetry": {"observers": ["mine.py:watch"]},
}


@pytest.fixture
def sections(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "a.srt").write_text("one\n\n" + "a long text of a talk " * 3, encoding="utf-8")
    data = {
        "sources": [{"uri": str(tmp_path / "*.srt"), "reader": "mine.py:cues"}],
        "cleaning": {"filters": ["mine.py:is_long"]},
    }
    return {"data": data, **ALL}


CHANGES = {
    "reader": ("data.decode()", "data.decode('utf-8')", {"dataset", "run"}),
    "filter": ("> 20", "> 30", {"dataset", "run"}),
    "objective": ("** gamma", "* gamma", {"run"}),
    "metric": ("right / total", "right / (total or 1)", {"verdict"}),
    "observer": ("(step, sorted(metrics))", "(step, list(metrics))", set()),
    "comment": ('"""Functions of our own."""', '"""Functions of ours."""\n# a comment', set()),
}


def test_files_with_any_line_ends_and_a_byte_order_mark_have_one_digest_here_and_there(
    make_spec_file: MakeFile, tmp_path: Path
) -> None:
    code = ("\ufeff" + MINE + "\neval('1')  # counts as a whole\n").replace("\n", "\r\n")
    spec, store = load_spec(make_spec_file(code, **ALL)), open_store(f"file://{tmp_path}/store")
    publish_code(spec, store)
    enter_code(store, spec.code)
    bound = bind(spec.training.objective)
    assert isinstance(bound, partial) and bound.keywords == {"gamma": 2.0}


@pytest.mark.parametrize("what", CHANGES)
def test_changed_source_changes_the_identity_of_its_role_and_no_other(
    what: str, make_spec_file: MakeFile, sections: dict[str, Any]
) -> None:
    old, new, expected = CHANGES[what]
    assert old in MINE

    def identities(code: str) -> dict[str, str]:
        spec = load_spec(make_spec_file(code, **sections))
        dataset = identify(spec)
        return {"dataset": dataset, "run": run_id(spec, dataset), "verdict": settings_key(spec), "code": str(spec.code)}

    before, after = identities(MINE), identities(MINE.replace(old, new))
    assert {name for name in before if before[name] != after[name]} == expected | {"code"}


def test_arguments_are_in_the_identity_however_they_are_written(
    make_spec_file: MakeFile, sections: dict[str, Any]
) -> None:
    spec = load_spec(make_spec_file(**sections))
    nested = {**sections, "training": {"objective": {"use": "mine.py:focal", "arguments": {"gamma": 2.0}}}}
    same = load_spec(make_spec_file(**nested))
    assert run_id(spec, "d") == run_id(same, "d")
    assert run_id(load_spec(make_spec_file(**sections), ["training.objective.gamma=3"]), "d") != run_id(spec, "d")
    on_kfp = parse_spec(from_struct(json.loads(json.dumps(to_struct(written_spec(spec))), parse_int=float)))
    assert on_kfp == spec == parse_spec(dump_spec(spec)), "no engine changes a type of an argument"
    assert spec.training.objective.keywords == {"gamma": 2.0}
    assert isinstance(on_kfp.training.objective.keywords["gamma"], float)


def test_everything_wrong_is_refused_together_with_its_line_and_nothing_is_imported(
    make_spec_file: MakeFile, tmp_path: Path
) -> None:
    path = make_spec_file(
        MINE + "\nraise SystemExit('imported')\n",
        data={"sources": [{"uri": "x", "reader": "mine.py:nothing"}], "cleaning": {"filters": ["mine.py:focal"]}},
        training={"objective": {"use": "mine.py:focal", "gama": 1}},
        evaluation={"metrics": [{"use": "mine.py:seen"}]},
        telemetry={"observers": [{"use": "mine.py:watch", "every": 2}]},
    )
    with pytest.raises(SpecError) as refused:
        load_spec(path)
    found = {problem.field.removesuffix(".use"): str(problem) for problem in refused.value.problems}
    says = {
        "data.sources.0.reader": "names nothing, which is not defined",
        "data.cleaning.filters.0": "without targets",
        "training.objective": "'gama', which it does not take; it takes gamma",
        "evaluation.metrics.0": "names seen, which is not defined with `def`",
        "telemetry.observers.0": "'every'",
    }
    assert found.keys() == says.keys()
    for field, text in says.items():
        assert text in found[field]
        assert "spec.yaml:" in found[field], "file and line"


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"training": {"objective": "gone.py:focal"}}, "does not exist"),
        ({"training": {"objective": "mine.py:focal"}, "telemetry": {"observers": ["sub/o.py:o"]}}, "folders of code"),
        ({"training": {"objective": "mine.py"}}, "not one of the choices"),
        ({"training": {"objective": {"gamma": 2}}}, "is not a field"),
        ({"training": {"objective": {"use": "mine.py:focal", "arguments": "{"}}}, "no names with JSON values"),
        ({"training": {"objective": "mine.py:focal"}, "parallel": {"strategy": "zero1"}}, "your own objective"),
        (
            {"training": {"objective": "mine.py:focal"}, "parallel": {"tensor": 2, "processes": 2, "strategy": "fsdp"}},
            "leaves no rank the logits",
        ),
        ({"data": {"kind": "chat", "sources": [{"uri": "x", "reader": "mine.py:cues"}]}}, "yields no chat"),
        ({"data": {"sources": [{"uri": "x", "format": "jsonl", "reader": "mine.py:cues"}]}}, "a source with a reader"),
        (
            {"training": {"schedule": {"factor": "mine.py:watch", "warmup_steps": 2}}},
            "is not used with a factor of your own",
        ),
        ({"evaluation": {"metrics": ["mine.py:accuracy", "mine.py:accuracy"]}}, "the name of two metrics"),
    ],
)
def test_what_cannot_work_is_refused(make_spec_file: MakeFile, sections: dict[str, Any], says: str) -> None:
    path = make_spec_file(**sections)
    (path.parent / "sub").mkdir()
    (path.parent / "sub" / "o.py").write_text("def o(a, b): pass\n")
    with pytest.raises(SpecError, match=says):
        load_spec(path)


def test_a_spec_without_code_has_the_id_that_it_always_had(make_spec_file: MakeFile) -> None:
    spec = load_spec(make_spec_file())
    assert spec.code is None
    assert run_id(spec, "d") == run_id(parse_spec({"name": "test", "data": {"sources": [{"uri": "x"}]}}), "d")
    assert "objective" not in written_spec(spec).get("training", {})


def test_the_digest_and_the_arguments_are_on_the_command_lines_and_not_taken_from_the_store(
    make_spec_file: MakeFile, tmp_path: Path
) -> None:
    spec = load_spec(make_spec_file(**ALL))
    command = training_job(spec, "run", 1, "s3://bucket/x").command
    assert command[command.index("--code") + 1] == spec.code
    functions = command[command.index("--functions") + 1]
    assert json.loads(functions) == rank_functions(spec)
    assert set(json.loads(functions)) == {"training.objective", "telemetry.observers.0"}, "what ranks call"
    for job in jobs_of(RunRequest(spec, f"file://{tmp_path}/store", run_id="0123456789abcdef")):
        assert f"code={spec.code}" in job["script"]

    require_functions(spec, functions, "launch 1")
    for change in ({"training.objective.gamma": 9.0}, {"training.objective.use": "mine.py:other"}):
        with pytest.raises(DataError, match="changed after the launch"):
            require_functions(spec.with_overrides(change), functions, "launch 1")
    with pytest.raises(DataError, match="changed after the launch"):
        require_functions(spec, "", "launch 1")


def test_a_bundle_is_published_with_the_request_and_a_store_is_not_trusted_with_code(
    make_spec_file: MakeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_spec(make_spec_file(**ALL))
    store = open_store(f"file://{tmp_path}/store")
    assert spec.code is not None
    publish_code(spec, store)
    assert store.stat(layout.code(spec.code)) is not None
    require_known_code(spec, "run x")
    enter_code(store, spec.code)
    bound = bind(spec.training.objective)
    assert isinstance(bound, partial) and bound.keywords == {"gamma": 2.0}
    other = spec.training.objective.model_copy(update={"digest": "0" * 64})
    with pytest.raises(DataError, match="not the one of the run's identity"):
        bind(other)

    (kept,) = (tmp_path / "home").rglob(f"{spec.code.removeprefix('blake3:')}.bundle")
    kept.write_bytes(kept.read_bytes() + b"x")
    with pytest.raises(DataError, match="was changed; delete it"):
        publish_code(spec, store)

    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "another machine"))
    assert not is_kept(spec.code)
    publish_code(spec, store)  # it is in the store
    with pytest.raises(MissingError, match="a store is not trusted with code"):
        require_known_code(spec, "run x")
    store.delete(layout.code(spec.code))
    with pytest.raises(MissingError, match="run its spec again"):
        publish_code(spec, store)


def test_a_cluster_whose_store_is_unknown_here_gets_no_request_with_code(
    make_spec_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOLDFAST_STORE", raising=False)
    spec = load_spec(make_spec_file(data={"sources": [{"uri": "s3://bucket/text"}]}, **ALL))
    with pytest.raises(SpecError, match="to send your code to it"):
        compile_spec(spec, "argo")
