"""Where things lie under the root of the store: the one place that spells keys.

datasets/<dataset-id>/dataset.json + shards
         _units/<digest>/      what preprocess has tokenised already: a cache
runs/<run-id>/run.json                        what the run is: spec, dataset id, salt
              backend.json                    where it was submitted last, and how
              launches/000003.json            one start by a launcher, and what it told the ranks
              launches/000003.ending.json     how it ended
              attempts/000007.json            one gang that formed, claimed by put-if-absent: the fencing token
              checkpoints/step-000001200.json the manifest; writing it is the commit
              checkpoints/damaged/            manifests that two readers found damaged
              checkpoints/doubts/step-000001200/000007.json  what one reader could not verify
              packs/<attempt>-<digest>.pack   tensor bytes
              metrics/000000000-000000050.000007.jsonl  what that attempt measured of every step of (from, to]
              events/<writer>-000003.jsonl    what happened: typed events, in objects of their writers
              export/step-000001200/          Hugging Face layout
              result.json                     training finished: the final checkpoint and export
              evaluations/<key>.json + .html  the verdict and its report
              registrations/<key>.json        the registered model version
triggers/<name>/<key>.json                    whether a retraining of the spec `name` was due, and why
jobs/<job>/<step>.json                        what became of a step of one execution of the DAG on a cluster
"""

from __future__ import annotations


def dataset(dataset_id: str, name: str = "dataset.json") -> str:
    """A file of a dataset."""
    return f"datasets/{dataset_id}/{name}"


def unit(digest: str, name: str = "") -> str:
    """What preprocess has done for one piece of a source: a cache by content, shared by all datasets."""
    return f"datasets/_units/{digest}/{name}"


def run(run_id: str, name: str = "") -> str:
    """A file or folder of a run."""
    return f"runs/{run_id}/{name}"


def launches(run_id: str) -> str:
    """The folder of the launches: numbered records, each with how it ended beside it."""
    return run(run_id, "launches/")


def attempts(run_id: str) -> str:
    """The folder of the claims of attempts: numbered records."""
    return run(run_id, "attempts/")


def ending(run_id: str, launch: int) -> str:
    """How a launch ended."""
    return f"{launches(run_id)}{launch:06d}.ending.json"


def checkpoint(run_id: str, step: int) -> str:
    """The manifest of a checkpoint."""
    return run(run_id, f"checkpoints/step-{step:09d}.json")


def damaged(run_id: str, step: int | None = None) -> str:
    """Where the manifest of a damaged checkpoint is set aside, or the folder of all of them."""
    return run(run_id, "checkpoints/damaged/" + ("" if step is None else f"step-{step:09d}.json"))


def doubts(run_id: str, step: int | None = None) -> str:
    """The folder of what single readers could not verify of a checkpoint, or of all: `<attempt>.json`."""
    return run(run_id, "checkpoints/doubts/" + ("" if step is None else f"step-{step:09d}/"))


def pack(run_id: str, name: str) -> str:
    """A pack of tensor bytes, named by the attempt that wrote it and a digest of its pieces."""
    return run(run_id, f"packs/{name}.pack")


def metrics(run_id: str, after: int, upto: int, attempt: int) -> str:
    """What an attempt measured of the steps in (after, upto]."""
    return run(run_id, f"metrics/{after:09d}-{upto:09d}.{attempt:06d}.jsonl")


def events(run_id: str, writer: str, segment: int) -> str:
    """A segment of the events that one process wrote."""
    return run(run_id, f"events/{writer}-{segment:06d}.jsonl")


def export(run_id: str, step: int, name: str = "") -> str:
    """A file of an exported model, or its folder."""
    return run(run_id, f"export/step-{step:09d}/{name}")


def result(run_id: str) -> str:
    """The result of a finished training."""
    return run(run_id, "result.json")


def verdict(run_id: str, key: str, suffix: str = "json") -> str:
    """The verdict (json) or the report (html) of an evaluation with the settings that `key` stands for."""
    return run(run_id, f"evaluations/{key}.{suffix}")


def registration(run_id: str, key: str) -> str:
    """The record of a registration with the settings that `key` stands for."""
    return run(run_id, f"registrations/{key}.json")


def job(job_id: str, step: str = "") -> str:
    """What became of a step in one execution of the DAG, or the folder of all its steps."""
    return f"jobs/{job_id}/{step}.json" if step else f"jobs/{job_id}/"


def trigger(name: str, key: str) -> str:
    """The answer to whether a retraining of the spec `name` is due; `key` stands for the question."""
    return f"triggers/{name}/{key}.json"
