"""Where things lie under the root of the store: the one place that spells keys.

datasets/<dataset-id>/dataset.json + shards
         _units/<digest>/      what preprocess has tokenised already: a cache
runs/<run-id>/run.json                        what the run is: spec, dataset id, salt
              parent.json                     the run and the step that it was forked from, whose bytes it began with
              backend.json                    where it was submitted last, and how
              launches/000003.json            one start by a launcher, and what it told the ranks
              launches/000003.ending.json     how it ended
              health/000002.json              what an examination of the ranks found, before they trained
              attempts/000007.json            one gang that formed, claimed by put-if-absent: the fencing token
              attempts/000007.began.json      the step that it began from, where it keeps copies near its ranks
              checkpoints/step-000001200.json the root manifest; writing it is the commit
              checkpoints/damaged/            manifests that two readers found damaged
              checkpoints/pins/step-000001200/person.json    who keeps it from being collected
              checkpoints/doubts/step-000001200/000007.json  what one reader could not verify
              checkpoints/readers/step-000001200/<reader>.json  a copy of a root that somebody reads at the moment
              collector.json                  who collects what no checkpoint needs: a lease
              indexes/000007-000001200/00003.idx        which pieces writer 3 holds of that attempt's step, and where
                                       00003.failed     why it could not save
                                       node-1-00000.idx the indexes of 32 writers
              packs/<attempt>-<step>-<digest>.pack      tensor bytes
              metrics/000000000-000000050.000007.jsonl  what that attempt measured of every step of (from, to]
              events/<writer>-000003.jsonl    what happened: typed events, in objects of their writers
                     <first>.<last>.<digest>.jsonl  several of them, folded into one
              audits/000000400-000000450.000007.json  the steps of (from, to] of that attempt, computed again
              logs/rank-00005/<stream>/000002.log  what one process of a rank printed; stream.json says which
              export/step-000001200-<state digest>/      Hugging Face layout, and what MLflow needs beside it
              export/step-000001200-<state digest>.json  the digests of its files; .mlflow.json: of those for MLflow
              result.json                     training finished: the final checkpoint and export
              evaluations/<key>.json + .html  the verdict and its report
              registrations/<key>.json        the registered model version
              blessings/<digest>.json         the verdict that blessed it
names/<name>/<run-id>                         that a run or a sweep was started or submitted under this name: an index
champions/<key>/000002.json                   the second champion of a registered model in one MLflow, claimed by number
sweeps/<sweep-id>/comparison.json + .md       the trials of a sweep, and the best of them
triggers/<name>/<key>.json                    whether a retraining of the spec `name` was due, and why
                started-<run-id>.json         which execution of the DAG was to do it
jobs/<job>/<step>.json                        what became of a step of one execution of the DAG on a cluster
           <step>-<part>.json                 or of one part of it: a share of the corpus, a trial of a sweep
logs/<job>/<step>/<stream>/000002.log         what one process of a step of it printed; stream.json says which
"""

from __future__ import annotations

from urllib.parse import quote

LONGEST_NAME = 64  # characters of a name that its mark has: a folder's name may not be long


def dataset(dataset_id: str, name: str = "dataset.json") -> str:
    """A file of a dataset."""
    return f"datasets/{dataset_id}/{name}"


def unit(digest: str, name: str = "") -> str:
    """What preprocess has done for one piece of a source: a cache by content, shared by all datasets."""
    return f"datasets/_units/{digest}/{name}"


def run(run_id: str, name: str = "") -> str:
    """A file or folder of a run."""
    return f"runs/{run_id}/{name}"


def named(name: str, run_id: str = "") -> str:
    """The mark that a run, or a sweep, was started or submitted under a name, or the folder of all of that name."""
    return f"names/{quote(name[:LONGEST_NAME], safe='').replace('.', '%2E')}/{run_id}"


def parent(run_id: str) -> str:
    """The run and the step that a run was forked from."""
    return run(run_id, "parent.json")


def launches(run_id: str) -> str:
    """The folder of the launches: numbered records, each with how it ended beside it."""
    return run(run_id, "launches/")


def health(run_id: str) -> str:
    """The folder of the examinations of the ranks: numbered records."""
    return run(run_id, "health/")


def attempts(run_id: str) -> str:
    """The folder of the claims of attempts: numbered records."""
    return run(run_id, "attempts/")


def began(run_id: str, attempt: int) -> str:
    """The step that an attempt began from."""
    return f"{attempts(run_id)}{attempt:06d}.began.json"


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


def readers(run_id: str) -> str:
    """The folder of the marks of readers: copies of the roots that they read."""
    return run(run_id, "checkpoints/readers/")


def reader(run_id: str, step: int, name: str) -> str:
    """The mark of a reader, while it reads a checkpoint."""
    return f"{readers(run_id)}step-{step:09d}/{name}.json"


def collector(run_id: str) -> str:
    """The lease of the collector."""
    return run(run_id, "collector.json")


def pins(run_id: str) -> str:
    """The folder of what keeps checkpoints from being collected."""
    return run(run_id, "checkpoints/pins/")


def pin(run_id: str, step: int, name: str) -> str:
    """That `name` keeps the checkpoint at `step` from being collected."""
    return f"{pins(run_id)}step-{step:09d}/{name}.json"


def indexes(run_id: str, attempt: int | None = None, step: int = 0) -> str:
    """The folder of the indexes that an attempt wrote for a step, or of all."""
    return run(run_id, "indexes/" + ("" if attempt is None else f"{attempt:06d}-{step:09d}/"))


def index(run_id: str, name: str) -> str:
    """An index, by the name that an entry has for it: `<attempt>-<step>/<child>.idx`."""
    return run(run_id, f"indexes/{name}")


def packs(run_id: str) -> str:
    """The folder of the packs."""
    return run(run_id, "packs/")


def pack(run_id: str, name: str) -> str:
    """A pack of tensor bytes, named by the attempt and the step that wrote it and a digest of its pieces."""
    return run(run_id, f"packs/{name}.pack")


def metrics(run_id: str, after: int, upto: int, attempt: int) -> str:
    """What an attempt measured of the steps in (after, upto]."""
    return run(run_id, f"metrics/{after:09d}-{upto:09d}.{attempt:06d}.jsonl")


def events(run_id: str, writer: str, segment: int) -> str:
    """A segment of the events that one process wrote."""
    return run(run_id, f"events/{writer}-{segment:06d}.jsonl")


def audits(run_id: str) -> str:
    """The folder of what audits found."""
    return run(run_id, "audits/")


def audit(run_id: str, after: int, upto: int, attempt: int) -> str:
    """What an audit found in the steps in (after, upto] that an attempt computed."""
    return f"{audits(run_id)}{after:09d}-{upto:09d}.{attempt:06d}.json"


def rank_log(run_id: str, rank: int | None = None, stream: str = "", name: str = "") -> str:
    """A piece of what a process of a rank printed, or the folder of the process, of the rank, or of all ranks."""
    parts = ["" if rank is None else f"rank-{rank:05d}/", f"{stream}/" if stream else "", name]
    return run(run_id, "logs/" + "".join(parts))


def export(run_id: str, step: int, state_digest: str, name: str = "") -> str:
    """A file of an exported model, or its folder. The state stands in the key: what was judged is never overwritten by
    another training of the same run."""
    return run(run_id, f"export/step-{step:09d}-{state_digest[:16]}/{name}")


def exports(run_id: str) -> str:
    """The folder of the exported models."""
    return run(run_id, "export/")


def export_record(export: str) -> str:
    """The record of an exported model, whose folder is `export`: its files and their digests."""
    return f"{export.rstrip('/')}.json"


def package_record(export: str) -> str:
    """The digests of the files that MLflow needs beside an exported model."""
    return f"{export.rstrip('/')}.mlflow.json"


def result(run_id: str) -> str:
    """The result of a finished training."""
    return run(run_id, "result.json")


def verdict(run_id: str, key: str, suffix: str = "json") -> str:
    """The verdict (json) or the report (html) of an evaluation with the settings that `key` stands for."""
    return run(run_id, f"evaluations/{key}.{suffix}")


def registration(run_id: str, key: str) -> str:
    """The record of a registration with the settings that `key` stands for."""
    return run(run_id, f"registrations/{key}.json")


def registrations(run_id: str) -> str:
    """The folder of the records of registrations."""
    return run(run_id, "registrations/")


def blessing(run_id: str, verdict_digest: str) -> str:
    """The verdict that a registration names, as it was then: the run may be judged anew under the same key."""
    return run(run_id, f"blessings/{verdict_digest}.json")


def champions(key: str) -> str:
    """The folder of the claims to be champion; `key` stands for the registered model and the MLflow."""
    return f"champions/{key}/"


def job(job_id: str, step: str = "") -> str:
    """What became of a step in one execution of the DAG, or the folder of all its steps."""
    return f"jobs/{job_id}/{step}.json" if step else f"jobs/{job_id}/"


def step_log(job_id: str, step: str = "", stream: str = "", name: str = "") -> str:
    """A piece of what a process of a step printed, or the folder of the process, of the step (or one part of it), or of
    all steps of an execution of the DAG."""
    return f"logs/{job_id}/" + "".join([f"{part}/" for part in (step, stream) if part]) + name


def sweep(sweep_id: str, name: str) -> str:
    """A file of a sweep."""
    return f"sweeps/{sweep_id}/{name}"


def trigger(name: str, key: str) -> str:
    """The answer to whether a retraining of the spec `name` is due; `key` stands for the question."""
    return f"triggers/{name}/{key}.json"
