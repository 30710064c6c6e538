"""The YAML of downstream tasks: a task or a group, its `include` files, and the members of a group.

Names in a group are those of the YAML files in its folder and below, as lm-evaluation-harness resolves them. Only plain
YAML is read. What would download data or run code is refused.
"""

import posixpath
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml

from holdfast.spec.errors import DataError, MissingError, shown
from holdfast.spec.operations import Task
from holdfast.store import Store

PASSED_TESTS = "pass_at_1"  # our metric: the share of answers whose code passes the tests of the target
# Metrics of the library itself. The library would look up any other name on the Hub and run what it finds.
METRICS = (
    *"""
    acc acc_all acc_bytes acc_mutual_info acc_norm bits_per_byte bleu brier_score byte_perplexity chrf chrf++
    exact_match f1 likelihood mcc perplexity ter word_perplexity
    """.split(),
    PASSED_TESTS,
)
LOWER_IS_BETTER = (*"bits_per_byte brier_score byte_perplexity perplexity ter word_perplexity".split(),)
DEFAULT_METRICS = {  # of a task without `metric_list`, by output_type
    "loglikelihood": ("perplexity", "acc"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "multiple_choice": ("acc", "acc_norm"),
    "generate_until": ("exact_match",),
}
LOADERS = ("json", "csv", "parquet", "text")  # loaders of `datasets` that read files and download nothing
FOREIGN = ("class", "custom_dataset", "unsafe_code", "use_prompt")
FEWSHOT = frozenset({"sampler", "split"})
MEMBER = frozenset({"task", "group", "task_alias", "group_alias", "aggregate_metric_list", "metadata", "description"})
GROUP = MEMBER | {"tag"}
TEXT_BYTES = 2**20  # of a task file at most
MAX_FILES = 2000  # YAML files in the folder of a group
MAX_LISTED = 20_000  # files of any kind in it
MAX_INCLUDES = 20  # files of which each one includes the next one
MAX_DEPTH = 40  # lists and mappings inside each other, in a task file
MAX_EXPANDED = TEXT_BYTES  # characters and values of a task file, with its aliases written out
SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class TaskConfigs:
    """The configurations of a task, or of a group and its members. `include` is resolved, and names of data files are
    relative to the folder of the first file."""

    name: str
    tasks: tuple[dict[str, Any], ...]
    groups: tuple[dict[str, Any], ...] = ()  # the one to score first
    text: str = ""  # of the first file
    others: Mapping[str, str] = field(default_factory=dict)  # the texts of all other files, by name
    higher_is_better: bool = True  # of the metric that counts

    def identity(self) -> dict[str, Any]:
        """What a digest of the files covers."""
        return {"file": self.text, **({"files": dict(self.others)} if self.others else {})}


def read_configs(store: Store, name: str, task: Task) -> TaskConfigs:
    """Read the file `name` of a store, and the files that it refers to. Raises MissingError, and DataError for what
    cannot be scored."""
    reader = _TaskReader(store, task)
    config = reader.read(name)
    if "group" in config:
        title = config["group"]
        if not isinstance(title, str):
            raise DataError(f"evaluation.tasks: {task.uri}: `group` is {shown(title)}; give the name of the group")
        groups, tasks = reader.members(config)
        filters = _aggregated_filters(config, task)
    else:
        reader.require_task(config, task.uri)
        groups, tasks, title = (), (config,), config["task"]
        filters = set()
    is_better = _higher_is_better(tasks, filters | ({task.filter} if task.filter else set()), task)
    others = {other: text for other, text in sorted(reader.used().items()) if other != name}
    return TaskConfigs(title, tasks, groups, reader.texts[name], others, is_better)


def _aggregated_filters(group: Mapping[str, Any], task: Task) -> set[str]:
    """The filters that a group names for the metric; empty if it takes all. Raises DataError for a missing metric or
    filter."""
    entries = _aggregates(group, task.uri)
    named = [entry.get("filter_list") for entry in entries if entry["metric"] == task.metric]
    if not named:
        has = ", ".join(entry["metric"] for entry in entries) or "none: add it to its aggregate_metric_list"
        raise DataError(f"evaluation.tasks: {task.uri} has no metric {task.metric!r}; it has {has}")
    lists = [[names] if isinstance(names, str) else names for names in named if names]
    if not all(isinstance(names, list) and all(isinstance(each, str) for each in names) for names in lists):
        raise DataError(f"evaluation.tasks: {task.uri}: filter_list is {shown(lists)}; list names of filters")
    filters = {each for names in lists for each in names}
    if len(lists) == len(named) and task.filter and task.filter not in filters:
        raise DataError(_no_filter(task.uri, task, filters))
    return filters


def _higher_is_better(configs: Iterable[Mapping[str, Any]], filters: set[str], task: Task) -> bool:
    """The direction of the metric, which all tasks must have with these filters. Raises DataError."""
    directions: dict[bool, str] = {}
    for config in configs:
        where = f"{task.uri}: task {config['task']!r}"
        output = str(config.get("output_type", "generate_until"))
        metrics = config.get("metric_list") or [{"metric": name} for name in DEFAULT_METRICS.get(output, ())]
        found = {metric["metric"]: metric for metric in metrics}
        if task.metric not in found:
            raise DataError(f"evaluation.tasks: {where} has no metric {task.metric!r}; it has {', '.join(found)}")
        has = config.get("filter_list") or [{"name": "none"}]
        if not isinstance(has, list) or not all(isinstance(e, dict) and isinstance(e.get("name"), str) for e in has):
            raise DataError(f"evaluation.tasks: {where}: filter_list is {shown(has)}; list entries with `name`")
        for name in sorted(filters - {entry["name"] for entry in has}):
            raise DataError(_no_filter(where, task, [entry["name"] for entry in has], name))
        direction = found[task.metric].get("higher_is_better", task.metric not in LOWER_IS_BETTER)
        if not isinstance(direction, bool):
            raise DataError(f"evaluation.tasks: {where}: higher_is_better is {shown(direction)}; write true or false")
        directions.setdefault(direction, str(config["task"]))
    if len(directions) > 1:
        raise DataError(
            f"evaluation.tasks: {task.uri}: a higher {task.metric} is better in task {directions[True]!r} and worse in "
            f"task {directions[False]!r}; write the same higher_is_better in both"
        )
    return True in directions


def _no_filter(where: str, task: Task, names: Iterable[str], name: str | None = None) -> str:
    return (
        f"evaluation.tasks: {where} has no metric {task.metric!r} of filter {name or task.filter!r}; it has the "
        f"filters {', '.join(sorted(names))}"
    )


def _aggregates(group: Mapping[str, Any], uri: str) -> list[dict[str, Any]]:
    entries = group.get("aggregate_metric_list") or []
    entries = [entries] if isinstance(entries, dict) else entries
    if not isinstance(entries, list) or not all(
        isinstance(e, dict) and isinstance(e.get("metric"), str) for e in entries
    ):
        raise DataError(
            f"evaluation.tasks: {uri}: aggregate_metric_list is {shown(entries)}; list entries with `metric`"
        )
    return entries


class _TaskReader:
    """Reads YAML files of one folder, each once."""

    def __init__(self, store: Store, task: Task) -> None:
        self._store, self._uri = store, task.uri
        self.texts: dict[str, str] = {}
        self._loaded: dict[str, dict[str, Any] | DataError | MissingError] = {}
        self._complete: dict[str, dict[str, Any]] = {}  # with includes
        self._used: dict[str, set[str]] = {}  # the files behind each complete file
        self._needed: set[str] = set()

    def read(self, name: str) -> dict[str, Any]:
        """The configuration of a file with its includes. The digest covers it."""
        config = self._merged(name, ())
        self._needed |= self._used[name]
        return _relative(config, posixpath.dirname(name))

    def used(self) -> dict[str, str]:
        """The texts of the files that take part."""
        return {name: self.texts[name] for name in self._needed}

    def members(self, group: dict[str, Any]) -> tuple[tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]]:
        """The groups and the tasks that a group reaches, itself first. Raises DataError for a name that no file has."""
        files, tags = self._index()
        groups, tasks = {group["group"]: group}, dict[str, dict[str, Any]]()
        pending = list(self._names(group))
        while pending:
            name = pending.pop(0)
            if name in tags:
                pending += tags[name]
            if name in groups or name in tasks or name in tags:
                continue
            if name not in files:
                raise DataError(
                    f"evaluation.tasks: {self._uri}: no file in its folder has the task or group {name!r}; nothing is "
                    "downloaded, so put its file there"
                )
            where, *same = files[name]
            if same:
                raise DataError(
                    f"evaluation.tasks: {self._uri}: {where} and {same[0]} both define {name!r}; remove or rename one"
                )
            config = self.read(where)
            if "group" in config:
                groups[name] = config
                pending += self._names(config)
            else:
                self.require_task(config, where)
                tasks[name] = config
        if not tasks:
            raise DataError(f"evaluation.tasks: {self._uri}: the group has no task; name tasks in its list `task`")
        return tuple(groups.values()), tuple(tasks.values())

    def require_task(self, config: dict[str, Any], where: str) -> None:
        """Raise DataError for a task that would fetch something, or run code."""
        if not isinstance(config.get("task"), str):
            raise DataError(f"evaluation.tasks: {where} has no `task`, the name of the task")
        for name in FOREIGN:
            if config.get(name):
                raise DataError(f"evaluation.tasks: {where}: `{name}` is not run here; write one whole task")
        fewshot = config.get("fewshot_config") or {}
        if not isinstance(fewshot, dict) or not set(fewshot) <= FEWSHOT:
            raise DataError(f"evaluation.tasks: {where}: fewshot_config may have {', '.join(sorted(FEWSHOT))} only")
        if config.get("dataset_path") not in LOADERS:
            raise DataError(
                f"evaluation.tasks: {where}: dataset_path is {shown(config.get('dataset_path'))}; local data are read "
                f"by one of {', '.join(LOADERS)}, with dataset_kwargs: {{data_files: ...}}"
            )
        metrics = config.get("metric_list") or ()
        if not isinstance(metrics, list | tuple):
            raise DataError(f"evaluation.tasks: {where}: metric_list is {shown(metrics)}; list entries with `metric`")
        for metric in metrics:
            if not isinstance(metric, dict) or metric.get("hf_evaluate") or metric.get("metric") not in METRICS:
                raise DataError(
                    f"evaluation.tasks: {where}: metric {shown(metric)} is none of the library's own, and another one "
                    f"would be fetched and run; use one of {', '.join(METRICS)}"
                )
            if metric["metric"] == PASSED_TESTS and config.get("output_type") != "generate_until":
                raise DataError(f"evaluation.tasks: {where}: {PASSED_TESTS} needs output_type: generate_until")
        kwargs = config.get("dataset_kwargs") or {}
        if not isinstance(kwargs, dict) or set(kwargs) != {"data_files"} or not kwargs["data_files"]:
            raise DataError(f"evaluation.tasks: {where}: dataset_kwargs must have data_files, and nothing else")

    def _names(self, group: Mapping[str, Any]) -> Iterator[str]:
        """The names that a group lists, also in groups that it defines itself."""
        _aggregates(group, self._uri)
        unknown = sorted(set(group) - GROUP, key=str)
        if unknown:
            raise DataError(
                f"evaluation.tasks: {self._uri}: group {group.get('group')!r:.80} sets `{unknown[0]}`; set it in the "
                f"files of its tasks. A group has {', '.join(sorted(GROUP))}"
            )
        members = group.get("task")
        for member in members if isinstance(members, list) else [members]:
            if isinstance(member, str):
                yield member
            elif isinstance(member, dict) and set(member) <= MEMBER and isinstance(member.get("group"), str):
                yield from self._names(member) if "task" in member else [member["group"]]
            elif isinstance(member, dict) and set(member) <= MEMBER and isinstance(member.get("task"), str):
                yield member["task"]
            else:
                raise DataError(
                    f"evaluation.tasks: {self._uri}: member {shown(member)} of group {group.get('group')!r:.80}; name "
                    "a task, a group or a tag of a file in this folder"
                )

    def _index(self) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """The files of each task and group in the folder, and the tasks of each tag. Other files are ignored."""
        names = list[str]()
        for count, info in enumerate(self._store.list("")):
            if count >= MAX_LISTED:
                self._refuse_folder(f"more than {MAX_LISTED:,} files")
            if info.key.endswith(SUFFIXES) and info.size <= TEXT_BYTES:
                names.append(info.key)
        if len(names) > MAX_FILES:
            self._refuse_folder(f"{len(names):,} YAML files, {MAX_FILES:,} at most are read")
        files, tags = dict[str, list[str]](), dict[str, list[str]]()
        for name in names:
            try:
                config = self._merged(name, ())
            except (DataError, MissingError):
                continue  # it may belong to something else; a needed name is then missing
            title = config.get("group", config.get("task"))
            if not isinstance(title, str):
                continue
            files.setdefault(title, []).append(name)
            listed = config.get("tag")
            for tag in listed if isinstance(listed, list) else [listed]:
                if isinstance(tag, str) and "group" not in config:
                    tags.setdefault(tag, []).append(title)
        return files, tags

    def _refuse_folder(self, content: str) -> NoReturn:
        raise DataError(
            f"evaluation.tasks: {self._uri}: its folder and those below it have {content}; move the task files and "
            "their data to a separate folder"
        )

    def _merged(self, name: str, above: tuple[str, ...]) -> dict[str, Any]:
        """A file with its includes, whose keys it overrides."""
        if name in self._complete:
            return self._complete[name]
        config = dict(self._load(name))
        includes = config.pop("include", None)
        includes = includes if isinstance(includes, list) else [includes] if includes is not None else []
        if not all(isinstance(include, str) for include in includes) or len(above) > MAX_INCLUDES:
            raise DataError(
                f"evaluation.tasks: {self._uri}: {name} includes {shown(includes)}; name files, at most "
                f"{MAX_INCLUDES} of which each one includes the next one"
            )
        merged: dict[str, Any] = {}
        used = {name}
        for include in includes:
            path = posixpath.normpath(posixpath.join(posixpath.dirname(name), include))
            if path.startswith(("/", "..")) or "://" in include:
                raise DataError(
                    f"evaluation.tasks: {self._uri}: {name} includes {shown(include)}; only files in the folder "
                    "of the task, or below it, are read"
                )
            if path in (name, *above):
                raise DataError(f"evaluation.tasks: {self._uri}: {name} includes {path}, which includes {name}")
            merged |= self._merged(path, (name, *above))
            used |= self._used[path]
        merged.pop("task_list", None)
        self._complete[name], self._used[name] = merged | config, used
        return self._complete[name]

    def _load(self, name: str) -> dict[str, Any]:
        """The content of a file without its includes. Each file is read once."""
        if name not in self._loaded:
            try:
                self._loaded[name] = self._parsed(name)
            except (DataError, MissingError) as error:
                self._loaded[name] = error
        loaded = self._loaded[name]
        if isinstance(loaded, Exception):
            raise loaded
        return loaded

    def _parsed(self, name: str) -> dict[str, Any]:
        where = self._uri if self._uri.endswith(f"/{name}") or self._uri == name else f"{self._uri}: {name}"
        if (info := self._store.stat(name)) is None:
            raise MissingError(f"evaluation.tasks: there is no task file {where}")
        if info.size > TEXT_BYTES:
            raise DataError(
                f"evaluation.tasks: {where} has {info.size:,} bytes, a task file has {TEXT_BYTES:,} at most"
            )
        raw = self._store.get(name)
        try:
            config = yaml.load(raw, _TaskLoader)  # noqa: S506 - a safe loader
        # ValueError: a number with thousands of digits. RecursionError: deep lists. Others: a text that does not fit
        # its tag, such as `!!bool x`.
        except (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError, TypeError) as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise DataError(
                f"evaluation.tasks: {where} is no plain YAML ({reason}): `!function` runs Python "
                "that the file brings, so it is refused; write the prompt as a template"
            ) from error
        if not isinstance(config, dict):
            raise DataError(f"evaluation.tasks: {where} has no `task`, the name of the task")
        _require_plain(config, where)
        self.texts[name] = raw.decode(errors="backslashreplace")
        return config


class _TaskLoader(yaml.SafeLoader):
    """Refuses keys (`<<`) that merge far more than the file holds."""

    _merged = 0

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        self._merged += len(node.value)
        if self._merged > MAX_EXPANDED:
            raise yaml.MarkedYAMLError(problem=f"its keys `<<` merge more than {MAX_EXPANDED:,} keys")


def _require_plain(config: Any, where: str) -> None:
    """Raise DataError for aliases that refer to themselves, or are far longer than the file when written out."""
    expanded, pending = 0, [(config, 1)]
    while pending:
        value, depth = pending.pop()
        expanded += len(value) if isinstance(value, str | bytes) else 0
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        if depth > MAX_DEPTH or expanded > MAX_EXPANDED:
            raise DataError(
                f"evaluation.tasks: {where}: its lists and mappings are more than {MAX_DEPTH} levels deep, or longer "
                f"than {MAX_EXPANDED:,} characters with YAML's aliases (`*name`) written out; write it without aliases"
            )
        if isinstance(inner, list | tuple | set):
            expanded += len(inner)
            pending += [(each, depth + 1) for each in inner]


def _relative(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """The configuration with names of data files that are relative to the first file's folder."""
    kwargs = config.get("dataset_kwargs")
    if not folder or not isinstance(kwargs, dict) or "data_files" not in kwargs:
        return config
    return {**config, "dataset_kwargs": {**kwargs, "data_files": _joined(kwargs["data_files"], folder)}}


def _joined(files: Any, folder: str) -> Any:
    if isinstance(files, str):
        return files if files.startswith("/") or "://" in files else f"{folder}/{files}"
    if isinstance(files, dict):
        return {split: _joined(entry, folder) for split, entry in files.items()}
    return [_joined(entry, folder) for entry in files] if isinstance(files, list) else files
