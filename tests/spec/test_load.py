"""Reading a spec: all problems are reported together, with field, value and remedy. A valid spec
survives a round trip.
"""

import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.spec import ExitCode, Spec, SpecError, dump_spec, load_spec, parse_spec, rules, strict_yaml
from holdfast.spec.cluster import amount
from holdfast.spec.errors import MissingError, Problem
from holdfast.spec.fields import Leaf, leaves
from holdfast.spec.load import MAX_BYTES
from tests.spec.conftest import RIGHT, Refused, text_with

EXAMPLES = sorted(Path(__file__).parents[2].glob("examples/*.yaml"))
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_spec(path: Path) -> None:
    spec = load_spec(path)
    assert parse_spec(dump_spec(spec)) == spec


@pytest.mark.parametrize(
    ("field", "value", "message", "remedy"),
    [
        ("training.steps", 0, "out of range", "a whole number from 1 to 1000000000"),
        ("training.steps", 1.5, "not a whole number", "a whole number from 1"),
        ("training.steps", "many", "not a whole number", "a whole number from 1"),
        ("training.steps", True, "takes no true or false", "a whole number from 1"),
        ("training.steps", None, "not a whole number", "Optimizer steps"),
        ("training.steps", [3], "not a whole number", "a whole number from 1"),
        ("training.seed", 2**63, "out of range", "from 0 to 9223372036854775807"),
        ("training.clip_norm", -1, "out of range", "a number above 0, or null"),
        ("training.clip_norm", float("inf"), "not a finite number", "a number above 0, or null"),
        ("training.optimizer.beta1", 1, "out of range", "a number of at least 0 and below 1. Decay"),
        ("training.optimizer.epsilon", "tiny", "not a number", "a number above 0. Added"),
        ("training.precision", "bf61", "not one of the choices", "did you mean 'bf16'? use one of `fp32`, `bf16`"),
        ("training.precision", 16, "not one of the choices", "use one of `fp32`"),
        ("training.compile", 7, "not true or false", "use true or false"),
        ("data.tokenizer.vocabulary", 257, "out of range", "from 258 to 1000000"),
        ("data.sources", [], "has too few items", "at least 1 and at most 1000 items"),
        ("data.sources", {"uri": "x"}, "not a list", "at least 1 and at most 1000 items"),
        ("data.sources.0", "x", "not a group of fields", "uri, format"),
        ("data.sources.0.uri", "", "too short", "text that is not empty"),
        ("data.sources.0.uri", 3, "not text", "text that is not empty"),
        ("evaluation.prompts", ["x"] * 51, "too many items", "at most 50 items, each text"),
        ("evaluation.prompts", ["a", 3], "not text", "use text. Prompts"),
        ("model", None, "is empty", "or leave it out"),
        ("model", 3, "not a group of fields", "layers, hidden"),
        ("name", "Große", "form that is not allowed", "lower-case letters, digits and dashes"),
        ("name", "foo-", "form that is not allowed", "no dash last"),
        ("cluster.namespace", "a.b", "form that is not allowed", "Kubernetes namespace"),
        ("cluster.service_account", "a..b", "form that is not allowed", "Service account"),
        ("cluster.resources.cpu", "four", "form that is not allowed", "(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$`. CPU cores"),
        ("cluster.resources.memory", "16 GB", "form that is not allowed", "Memory, as"),
        ("cluster.resources.memory", -1, "form that is not allowed", "Memory, as"),
        ("cluster.resources.memory", "1e9", "form that is not allowed", "Memory, as"),
        ("cluster.resources.cpu", "4\n", "form that is not allowed", "CPU cores"),
        ("cluster.node_selector", ["a"], "not names with values", "each name text of the form"),
        ("cluster.node_selector.a b", "c", "form that is not allowed", "each value text of the form"),
        ("cluster.node_selector.a", "b c", "form that is not allowed", "names with values"),
        ("cluster.node_selector.a", "x" * 64, "form that is not allowed", "names with values"),
        ("cluster.environment.A", 3, "not text", "each value text. Environment"),
        ("cluster.secrets", ["Wrong_Name"], "form that is not allowed", "use text of the form"),
        ("cluster.queue", "a queue", "form that is not allowed", "or null. Volcano queue"),
        ("cluster.tolerations.0.effect", "NoShedule", "not one of the choices", "did you mean 'NoSchedule'?"),
        ("cluster.volumes.0.path", "relative", "form that is not allowed", "absolute path"),
        ("version", 0, "not one of the choices", "use `1`"),
        ("training.objective.kind", "focal", "not one of the choices", "your own is FILE.py:FUNCTION, such as mine.py"),
        ("training.objective.use", "focal", "form that is not allowed", "use FILE.py:FUNCTION, such as mine.py:focal"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_what_is_allowed(
    refused: Refused, field: str, value: object, message: str, remedy: str
) -> None:
    required_fields = {"cluster.tolerations.0.key": "a", "cluster.volumes.0.claim": "a"}
    others = {path: text for path, text in required_fields.items() if field.startswith(path.rpartition(".")[0])}
    (problem,) = refused(**others, **{field: value})
    assert problem.field in (field, f"{field}.0", f"{field}.1", f"{field}.[key]")
    assert str(problem.value) in (str(value), "3", "Wrong_Name", "a b")
    assert message in problem.message
    assert remedy in problem.remedy


def test_a_list_with_refused_items_is_not_reported_too_short(refused: Refused) -> None:
    assert [problem.field for problem in refused(**{"data.sources": [{"uri": ""}, {"uri": "x", "wieght": 1}]})] == [
        "data.sources.0.uri",
        "data.sources.1.wieght",
    ]


def test_missing_fields_are_reported_with_what_they_take(refused: Refused) -> None:
    problems = refused("model: {layers: 2}")
    assert [(problem.field, problem.message) for problem in problems] == [
        ("name", "is required"),
        ("data", "is required"),
    ]
    assert "lower-case letters" in problems[0].remedy
    assert problems[1].remedy == "add the section data, or a training script: train.script"


@pytest.mark.parametrize("leaf", leaves(), ids=lambda leaf: leaf.path)
def test_a_misspelt_field_is_refused_with_the_right_one_at_every_level(refused: Refused, leaf: Leaf) -> None:
    path = leaf.path.replace("[]", ".0")
    misspelt = path[:-1] + "_" + path[-1]
    (problem,) = [problem for problem in refused(**{misspelt: 1}) if problem.field == misspelt]
    assert problem.message == "is not a field of the spec"
    assert problem.remedy == f"did you mean {leaf.name!r}?"


def test_the_default_of_a_misspelt_field_is_not_refused(refused: Refused) -> None:
    (problem,) = refused(**{"model.heads": 6, "model.hiden": 192})
    assert problem.remedy == "did you mean 'hidden'?"


def test_an_invalid_value_in_any_field_gives_a_spec_error() -> None:
    for leaf in leaves():
        field = leaf.path.replace("[]", ".0")
        with pytest.raises(SpecError):
            parse_spec(text_with(**{field: [[{"a": "b"}]]}))


def test_a_bug_in_a_rule_is_not_reported_as_a_refused_field(monkeypatch: pytest.MonkeyPatch) -> None:
    def misspelt(spec: Spec) -> Iterator[Problem]:
        yield Problem("name", spec.nmae, "", "")  # type: ignore[attr-defined]

    monkeypatch.setattr(rules, "RULES", (misspelt,))
    with pytest.raises(AttributeError, match="nmae"):
        parse_spec(text_with(**{"training.steps": 0}))


@pytest.mark.parametrize("section", ["modle", "trainig", "check_point", "Cluster", "sources"])
def test_a_misspelt_section_is_refused_with_the_known_ones(refused: Refused, section: str) -> None:
    (problem,) = refused(**{section: {}})
    assert problem.remedy.startswith(("did you mean", "known here: version, name"))


def test_a_secret_is_neither_accepted_nor_shown(refused: Refused) -> None:
    (problem,) = refused(**{"cluster.aws_secret_access_key": "hunter2"})
    assert problem.value == "(hidden)"
    assert "credentials come from the environment" in problem.remedy


def test_a_misspelt_field_that_looks_like_a_secret_is_put_right_without_its_value(refused: Refused) -> None:
    (problem,) = refused(**{"cluster.secret": "hunter2"})
    assert (problem.value, problem.remedy) == ("(hidden)", "did you mean 'secrets'?")


def test_a_secret_among_the_variables_is_not_shown(refused: Refused) -> None:
    (problem,) = refused(**{"cluster.environment": {"AWS_SECRET_ACCESS_KEY": ["hunter2"]}})
    assert problem.value == "(hidden)"


def test_a_number_is_a_quantity() -> None:
    resources = parse_spec(text_with(**{"cluster.resources": {"cpu": 1.5, "memory": 2**34}})).cluster.resources
    assert (resources.cpu, resources.memory) == ("1.5", "17179869184")


@pytest.mark.parametrize(
    ("quantity", "number"),
    [("4", 4), ("500m", Decimal("0.5")), ("1.5Gi", 1610612736), ("16G", 16 * 10**9), ("1Ki", 1024), ("2P", 2 * 10**15)],
)
def test_a_quantity_is_a_number(quantity: str, number: int | Decimal) -> None:
    assert amount(quantity) == number


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        ("name: a\nname: b", "spec:2:1", "'name' is given twice"),
        ("data: {sources: [{uri: x, uri: y}]}", "spec:1:27", "'uri' is given twice"),
        ("a: &x [1]\nb: *x", "spec:2:4", "aliases"),
        ("a: &x [*x]", "spec:1:8", "aliases"),
        ("a: !!python/object:os.system x", "spec:1:4", "tags"),
        ("a: !!int x", "spec:1:4", "tags"),
        ("a: !secret x", "spec:1:4", "tags"),
        ("? [1]\n: 2", "spec:1:3", "plain words"),
        ("a: [1", "spec:1:6", "expected ',' or ']'"),
        ("a: b: c", "spec:1:5", "mapping values"),
        ("a: \0", "", "not a printable character"),
        ('a: "x\\0"', "spec:1:4", "a NUL character is not supported"),
        ('b: 1\n"\\0": x', "spec:2:1", "a NUL character is not supported"),
        ('a: ["\\ud83d"]', "spec:1:5", "half of a pair of surrogates"),
        ('a: "\\ude42\\ud83d"', "spec:1:4", "half of a pair of surrogates"),
        ("a: " + "[" * 20_000, "", "nested too deeply"),
        ("a: " + "1" * 5000, "spec:1:4", "too long"),
        ("", "", "not a mapping"),
        ("just words", "", "not a mapping"),
        ("- a\n- b", "", "not a mapping"),
        ("version: 2\nname: a\nfuture: {}", "spec:1:1", "newer Holdfast"),
        ("a: " + "x" * MAX_BYTES, "", "too large"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_text_that_is_no_spec_is_refused_with_its_position(refused: Refused, text: str, where: str, says: str) -> None:
    (problem,) = refused(text)
    assert problem.place == where
    assert says in problem.message


def test_json_is_read_as_its_writers_escape_it() -> None:
    value = {"a": ["🙂 \U0010ffff", "é\u2028"], "🙂": None}
    assert strict_yaml.read(json.dumps(value)) == value
    assert strict_yaml.read(strict_yaml.write(value)) == value


def test_a_spec_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    for path in (loop, tmp_path / ("x" * 300), QUICKSTART / "in-a-file"):
        with pytest.raises(MissingError, match="use the path of a readable file"):
            load_spec(path)


def test_every_problem_has_its_position_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(
        "name: small\n"
        "data:\n"
        "  sources:\n"
        "    - {uri: a}\n"
        "    - uri: b\n"
        "      wieght: 2\n"
        "  validation_fraction: 2\n"
        "cluster:\n"
        "  node_selector: {a.b/c: x y}\n"
        "  tolerations: [{operator: Exists, effect: Never}]\n"
        "training: {steps: 10,\n"
        "  schedule: {warmup_steps: 10}}\n"
        "model: {layers: 0, heads: 3}\n"
    )
    with pytest.raises(SpecError) as error:
        load_spec(path, ["model.hidden=64", "training.optimizer={beta1: 7}", "evaluation.prompts=3"])
    places = {problem.field: problem.place for problem in error.value.problems}
    assert places == {
        "data.sources.1.wieght": f"{path}:6:7",
        "data.validation_fraction": f"{path}:7:3",
        "cluster.node_selector.a.b/c": f"{path}:9:3",
        "cluster.tolerations.0.key": f"{path}:10:17",  # required and missing: the place of the item
        "cluster.tolerations.0.effect": f"{path}:10:36",
        "model.layers": f"{path}:13:9",
        "training.optimizer.beta1": "--set",
        "evaluation.prompts": "--set",
        "training.schedule.warmup_steps": f"{path}:12:14",
        "model.hidden": "--set",
    }
    for problem in error.value.problems:
        assert f"\n  {problem.place}: {problem.field}: {problem.message}" in str(error.value)


def test_an_omitted_field_has_only_the_position_of_its_section(refused: Refused) -> None:
    assert [problem.place for problem in refused("model: {layers: 2}")] == ["", ""]
    (problem,) = refused(**{"training.micro_batch": 7})  # the default global_batch does not fit
    assert (problem.field, problem.place) == ("training.global_batch", "spec:5:1")


def test_fields_and_rules_are_reported_together_and_rules_on_invalid_fields_are_skipped(refused: Refused) -> None:
    problems = refused(
        name="Wrong",
        data={"sources": [], "cleaning": {"min_characters": 9, "max_characters": 3}},
        model={"heads": 3, "hidden": 64, "layers": "many", "experts": 2},
        parallel={"pipeline": 1024, "strategy": "zero1"},
        training={"steps": 0, "schedule": {"warmup_steps": 10**6}, "precision": "fp64"},
        schedule={"cron": "never"},
    )
    assert [problem.field for problem in problems] == [
        "name", "data.sources", "model.layers", "training.steps", "training.precision",  # problems of fields
        "parallel.processes", "model.hidden", "model.experts",
        "parallel.pipeline",  # no message about 1024 stages or the warm-up, whose fields are invalid
        "data.cleaning.min_characters", "schedule.cron",
    ]  # fmt: skip


@pytest.mark.parametrize("section", ["data", "model", "training", "cluster", "evaluation", "schedule"])
def test_an_invalid_section_does_not_suppress_rules_on_other_sections(refused: Refused, section: str) -> None:
    tree = {"data.cleaning": {"min_characters": 9, "max_characters": 3}, "store": "ftp://x"}
    fields = [
        problem.field for problem in refused(**{key: tree[key] for key in tree if section not in key}, **{section: 3})
    ]
    assert fields[0] == section
    assert "store" in fields
    assert ("data.cleaning.min_characters" in fields) == (section != "data")


def test_yaml_has_none_of_its_old_surprises() -> None:
    text = (
        "[no, yes, on, 12:30, 2024-01-01, 1_000, 010, 0x10, 0o10, 1e-3, 1.5, .5, -3, true, null, ~, '', <<, 0b1, +.inf]"
    )
    assert strict_yaml.read(text) == [
        "no", "yes", "on", "12:30", "2024-01-01", "1_000", 10, 16, 8, 1e-3, 1.5, 0.5, -3, True, None, None, "", "<<",
        "0b1", float("inf"),
    ]  # fmt: skip
    assert strict_yaml.read("{1: a, null: b, true: c, <<: d}") == {"1": "a", "null": "b", "true": "c", "<<": "d"}


def test_an_unreadable_spec_file_is_reported(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.yaml", tmp_path):
        with pytest.raises(MissingError, match=str(path)) as error:
            load_spec(path)
        assert error.value.exit_code == ExitCode.NOT_FOUND


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"name: \xff\xfe", "is not UTF-8"),
        (b"#" * (MAX_BYTES + 1), "is too large"),
        (b"{", "(?s)not valid YAML.*correct the syntax"),
        (b"model:\n\tlayers: 2\n", "(?s)not valid YAML.*indent with spaces instead of tabs"),
    ],
)
def test_a_file_that_is_no_spec_is_reported_with_the_reason(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=says) as error:
        load_spec(path)
    assert str(path) in str(error.value)
    assert error.value.exit_code == ExitCode.BAD_SPEC


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("training.steps=50", "training.steps", 50),
        ("training.optimizer.learning_rate=3e-4", "training.optimizer.learning_rate", 3e-4),
        (" training.compile = true", "training.compile", True),
        ("training.clip_norm=null", "training.clip_norm", None),
        ("training.precision=bf16", "training.precision", "bf16"),
        ("name=other", "name", "other"),
        ("evaluation.prompts=[a, 'b=c']", "evaluation.prompts", ("a", "b=c")),
        ("data.sources.0.uri=s3://bucket/x=y", "data.sources.0.uri", "s3://bucket/x=y"),
        ("data.sources.0.uri=[", "data.sources.0.uri", "["),
        ("data.cleaning={deduplicate: false}", "data.cleaning.deduplicate", False),
    ],
)
def test_an_override_sets_a_field(override: str, field: str, value: object) -> None:
    spec = parse_spec(text_with(), [override])
    node: object = spec
    for part in field.split("."):
        node = node[int(part)] if isinstance(node, tuple) else getattr(node, part)
    assert node == value
    assert type(node) is type(value)


def test_the_last_override_wins_and_lists_are_reached_by_index() -> None:
    text = text_with(**{"evaluation.prompts": ["a", "b"]})
    spec = parse_spec(text, ["evaluation.prompts.1=c", "training.steps=5", "training.steps=6"])
    assert spec.evaluation.prompts == ("a", "c")
    assert spec.training.steps == 6


@pytest.mark.parametrize(
    ("override", "field", "says"),
    [
        ("training.steps", "--set", "not key=value"),
        ("=5", "--set", "not key=value"),
        ("training..steps=5", "--set", "not key=value"),
        ("", "--set", "not key=value"),
        ("training.stepz=5", "training.stepz", "'steps'"),
        ("trainig.steps=5", "trainig", "'training'"),
        ("training.steps=many", "training.steps", "not a whole number"),
        ("training.steps=", "training.steps", "not a whole number"),
        ("training.steps.deep=5", "training.steps", "not a whole number"),
        ("name.deep=5", "name", "no fields below it"),
        ("data.sources.1.uri=x", "data.sources.1", "index below 1"),
        ("data.sources.-1.uri=x", "data.sources.-1", "index below 1"),
        ("data.sources.².uri=x", "data.sources.²", "index below 1"),
        ("data.sources." + "9" * 5000 + "=x", "data.sources.9", "index below 1"),
        ("data.sources.first.uri=x", "data.sources.first", "index below 1"),
        (".".join(["x"] * 900) + "=1", "--set", "a field of 900 parts"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_an_override_that_cannot_be_applied_is_refused(refused: Refused, override: str, field: str, says: str) -> None:
    (problem,) = refused(overrides=(override,))
    assert problem.field.startswith(field)
    assert says in problem.message + problem.remedy


words = st.one_of(
    st.text(max_size=20), st.sampled_from(["yes", "1e3", "0o7", "null", "~", "12:30", "- a", "#", " x ", ""])
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), words),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
    max_leaves=10,
)
paths = st.sampled_from(
    [leaf.path.replace("[]", ".0") for leaf in leaves()] + ["data", "model", "data.sources.0", "x.y"]
)
relaxed = settings(max_examples=150)


def outcome(text: str, overrides: list[str]) -> Spec | str:
    """The spec, or its problems. Any error but SpecError is a bug."""
    try:
        return parse_spec(text, overrides)
    except SpecError as error:
        return str(error)


@relaxed
@given(st.text(max_size=200), st.lists(st.text(max_size=30), max_size=3))
def test_any_text_is_a_spec_or_refused(text: str, overrides: list[str]) -> None:
    outcome(text, overrides)


@pytest.mark.slow
@relaxed
@given(st.lists(st.tuples(paths, values), max_size=4))
def test_any_value_in_any_field_is_accepted_or_refused_reproducibly(changes: list[tuple[str, object]]) -> None:
    right = strict_yaml.write(RIGHT)
    overrides = [f"{path}={strict_yaml.write(value)}" for path, value in changes]
    first = outcome(right, overrides)
    assert outcome(right, overrides) == first
    if isinstance(first, Spec):
        assert parse_spec(dump_spec(first)) == first


@relaxed
@given(st.lists(st.tuples(paths, st.text(max_size=40)), max_size=3))
def test_any_override_is_accepted_or_refused(changes: list[tuple[str, str]]) -> None:
    outcome(strict_yaml.write(RIGHT), [f"{path}={text}" for path, text in changes])


@pytest.mark.slow
@relaxed
@given(st.text(st.characters(codec="utf-8"), max_size=50))
def test_any_text_in_a_field_survives_the_round_trip(text: str) -> None:
    spec = outcome(strict_yaml.write({**RIGHT, "evaluation": {"prompts": [text]}}), [])
    if isinstance(spec, Spec):
        assert spec.evaluation.prompts == (text,)
        assert parse_spec(dump_spec(spec)) == spec
    else:
        assert not text.isprintable()


def test_overrides_of_a_spec_are_checked_like_those_of_its_file() -> None:
    spec = load_spec(QUICKSTART, ["training.steps=60"])
    assert spec.with_overrides(["training.steps=60"]) == spec.with_overrides({"training.steps": 60}) == spec
    with pytest.raises(SpecError, match=r"(?s)training\.steps.*parallel\.tensor") as error:
        spec.with_overrides({"training.steps": -1, "parallel.tensor": 0})
    assert len(error.value.problems) == 2
    with pytest.raises(SpecError, match="global_batch"):  # a rule between fields
        spec.with_overrides(["training.micro_batch=3"])
