"""Layout of the store: the one module that defines keys.

datasets/<dataset-id>/dataset.json + shards
         _units/<digest>/      tokenized units of preprocess: a cache
bases/<weights>/nf4/<matrix>  a quantized matrix of frozen weights, by the digest of the weights
code/<digest>                 a bundle of a user's code, named by the whole digest of its bytes
verifications/<key>.json                      a script resumed with equal bits, in this environment: not verified again
runs/<run-id>/run.json                        the run's metadata: spec, dataset id, salt
              labels.json                     tags and a note, which people write
              parent.json                     the run and the step that it was forked from, whose bytes it began with
              backend.json                    the backend and the job of its last submission
              launches/000003.json            one start by a launcher, and what the ranks receive
              launches/000003.ending.json     how it ended
              health/000002.json              the health check of the ranks before they trained
              attempts/000007.json            one gang that formed, claimed by put-if-absent: the fencing token
              attempts/000007.began.json      the step that it began from, if it has local tiers
              checkpoints/step-000001200.json the root manifest; writing it is the commit
              checkpoints/damaged/            manifests that two readers found damaged
              checkpoints/pins/step-000001200/person.json    a pin, which keeps it from being collected
              checkpoints/doubts/step-000001200/000007.json  what one reader could not verify
              checkpoints/readers/step-000001200/<reader>.json  a copy of a root that a reader currently reads
              collector.json                  the lease of the garbage collector
              indexes/000007-000001200/00003.idx        the pieces of writer 3 for that attempt's step, and their places
                                       00003.failed     why it could not save
                                       node-1-00000.idx the indexes of 32 writers
              packs/<attempt>-<step>-<digest>.pack      tensor bytes
              metrics/000000000-000000050.000007.jsonl  metrics of that attempt for every step of (from, to]
              events/<writer>-000003.jsonl    typed events, in objects of their writers
                     <first>.<last>.<digest>.jsonl  several of them, folded into one
              audits/000000400-000000450.000007.json  the steps of (from, to] of that attempt, computed again
              logs/rank-00005/<stream>/000002.log  the output of one process of a rank; stream.json describes it
              rollouts/000000012/00003-<digest>.json  the answers of lot 3 that step 12 is the first to learn from
              export/step-000001200-<state digest>/      Hugging Face layout, and MLflow's additional files
              export/step-000001200-<state digest>.json  the digests of its files; .mlflow.json: of those for MLflow
              exactness.json                  a training script was verified: whether it resumed with equal bits
              result.json                     training finished: the final checkpoint and export
              evaluations/<key>.json + .html  the verdict and its report
              scores/step-<N>.json            the scores of a checkpoint, measured while training
              registrations/<key>.json        the registered model version
              documents/<key>/README.md       its model card; sbom.cdx.json: its bill of materials
              blessings/<digest>.json         the verdict that blessed it
names/<name>/<run-id>                         mark of a run or a sweep started or submitted under this name: an index
champions/<key>/000002.json                   the second champion of a registered model in one MLflow, claimed by number
sweeps/<sweep-id>/comparison.json + .md       the trials of a sweep, and the best of them
triggers/<name>/<key>.json                    whether a retraining of the spec `name` was due, and why
                started-<run-id>.json         the execution of the DAG that was to do it
submissions/<digest>.json                     the contexts of clusters that may have the run of a request
jobs/<job>/<step>.json                        the outcome of a step of one execution of the DAG on a cluster
           <step>-<part>.json                 or of one part of it: a share of the corpus, a trial of a sweep
logs/<job>/<step>/<stream>/000002.log         the output of one process of a step; stream.json describes it
"""

from urllib.parse import quote

LONGEST_NAME = 64  # characters of a name in its mark: folder names have a limit


def dataset(dataset_id: str, name: str = "dataset.json") -> str:
    """A file of a dataset."""
    return f"datasets/{dataset_id}/{name}"


def unit(digest: str, name: str = "") -> str:
    """The result of preprocess for one unit of a source: a cache by content, shared by all datasets."""
    return f"datasets/_units/{digest}/{name}"


def packed_base(weights: str, matrix: str) -> str:
    """A quantized matrix of the weights with this digest."""
    return f"bases/{weights}/nf4/{matrix}"


def code(digest: str) -> str:
    """A bundle of a user's code; `digest` is `blake3:` and 64 hexadecimal digits."""
    return f"code/{digest.rpartition(':')[2]}"


def run(run_id: str, name: str = "") -> str:
    """A file or folder of a run."""
    return f"runs/{run_id}/{name}"


def named(name: str, run_id: str = "") -> str:
    """The mark of a run or a sweep that was started or submitted under a name, or the folder of all marks of
    that name."""
    return f"names/{quote(name[:LONGEST_NAME], safe='').replace('.', '%2E')}/{run_id}"


def parent(run_id: str) -> str:
    """The run and the step that a run was forked from."""
    return run(run_id, "parent.json")


def labels(run_id: str) -> str:
    """The tags and the note of a run."""
    return run(run_id, "labels.json")


def launches(run_id: str) -> str:
    """The folder of the launches: numbered records, each next to the record of its end."""
    return run(run_id, "launches/")


def health(run_id: str) -> str:
    """The folder of the health checks of the ranks: numbered records."""
    return run(run_id, "health/")


def attempts(run_id: str) -> str:
    """The folder of the claims of attempts: numbered records."""
    return run(run_id, "attempts/")


def began(run_id: str, attempt: int) -> str:
    """The step that an attempt began from."""
    return f"{attempts(run_id)}{attempt:06d}.began.json"


def ending(run_id: str, launch: int) -> str:
    """The end of a launch."""
    return f"{launches(run_id)}{launch:06d}.ending.json"


def exactness(run_id: str) -> str:
    """The result of verifying the training script of a run."""
    return run(run_id, "exactness.json")


def verification(key: str) -> str:
    """The result of verifying a training script, which other runs of the same code and environment use."""
    return f"verifications/{key}.json"


def micro_batch(run_id: str, plan: str, candidate: int | None = None) -> str:
    """The micro-batch that a trial chose under a plan, or the mark that the trial of one candidate began."""
    return run(run_id, f"micro_batch/{plan}{'' if candidate is None else f'/{candidate:06d}'}.json")


def checkpoint(run_id: str, step: int) -> str:
    """The manifest of a checkpoint."""
    return run(run_id, f"checkpoints/step-{step:09d}.json")


def damaged(run_id: str, step: int | None = None) -> str:
    """The manifest of a quarantined checkpoint, or the folder of all of them."""
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
    """The folder of the pins, which keep checkpoints from being collected."""
    return run(run_id, "checkpoints/pins/")


def pin(run_id: str, step: int, name: str) -> str:
    """The pin of `name` on the checkpoint at `step`."""
    return f"{pins(run_id)}step-{step:09d}/{name}.json"


def indexes(run_id: str, attempt: int | None = None, step: int = 0) -> str:
    """The folder of the indexes that an attempt wrote for a step, or of all."""
    return run(run_id, "indexes/" + ("" if attempt is None else f"{attempt:06d}-{step:09d}/"))


def index(run_id: str, name: str) -> str:
    """An index, by its name in an entry: `<attempt>-<step>/<child>.idx`."""
    return run(run_id, f"indexes/{name}")


def packs(run_id: str) -> str:
    """The folder of the packs."""
    return run(run_id, "packs/")


def pack(run_id: str, name: str) -> str:
    """A pack of tensor bytes, named by the attempt and the step that wrote it and a digest of its pieces."""
    return run(run_id, f"packs/{name}.pack")


def metrics(run_id: str, after: int, upto: int, attempt: int) -> str:
    """The metrics of an attempt for the steps in (after, upto]."""
    return run(run_id, f"metrics/{after:09d}-{upto:09d}.{attempt:06d}.jsonl")


def events(run_id: str, writer: str, segment: int) -> str:
    """A segment of the events that one process wrote."""
    return run(run_id, f"events/{writer}-{segment:06d}.jsonl")


def audits(run_id: str) -> str:
    """The folder of the audit results."""
    return run(run_id, "audits/")


def audit(run_id: str, after: int, upto: int, attempt: int) -> str:
    """The result of an audit of the steps in (after, upto] that an attempt computed."""
    return f"{audits(run_id)}{after:09d}-{upto:09d}.{attempt:06d}.json"


def rank_log(run_id: str, rank: int | None = None, stream: str = "", name: str = "") -> str:
    """A piece of the output of a rank's process, or the folder of the process, of the rank, or of all ranks."""
    parts = ["" if rank is None else f"rank-{rank:05d}/", f"{stream}/" if stream else "", name]
    return run(run_id, "logs/" + "".join(parts))


def rollouts(run_id: str) -> str:
    """The folder of the generated answers."""
    return run(run_id, "rollouts/")


def rollout(run_id: str, step: int, name: str = "") -> str:
    """A file of the answers that `step` is the first to learn from, or their folder."""
    return f"{rollouts(run_id)}{step:09d}/{name}"


def export(run_id: str, step: int, state_digest: str, name: str = "") -> str:
    """A file of an exported model, or its folder. The key contains the state, so another training of the same run never
    overwrites a model that was evaluated."""
    return run(run_id, f"export/step-{step:09d}-{state_digest[:16]}/{name}")


def exports(run_id: str) -> str:
    """The folder of the exported models."""
    return run(run_id, "export/")


def export_record(export: str) -> str:
    """The record of the exported model in the folder `export`: its files and their digests."""
    return f"{export.rstrip('/')}.json"


def package_record(export: str) -> str:
    """The digests of the additional files that MLflow needs for an exported model."""
    return f"{export.rstrip('/')}.mlflow.json"


def result(run_id: str) -> str:
    """The result of a finished training."""
    return run(run_id, "result.json")


def verdict(run_id: str, key: str, suffix: str = "json") -> str:
    """The verdict (json) or the report (html) of an evaluation; `key` identifies its settings."""
    return run(run_id, f"evaluations/{key}.{suffix}")


def step_scores(run_id: str, step: int) -> str:
    """The scores of the checkpoint at `step`, measured while training."""
    return run(run_id, f"scores/step-{step:09d}.json")


def registration(run_id: str, key: str) -> str:
    """The record of a registration; `key` identifies its settings."""
    return run(run_id, f"registrations/{key}.json")


def registrations(run_id: str) -> str:
    """The folder of the records of registrations."""
    return run(run_id, "registrations/")


def model_document(run_id: str, key: str, name: str) -> str:
    """A document of a registered version, such as its model card; `key` is that of the registration."""
    return run(run_id, f"documents/{key}/{name}")


def blessing(run_id: str, verdict_digest: str) -> str:
    """The verdict of a registration, as it was then: a later evaluation of the run may use the same key."""
    return run(run_id, f"blessings/{verdict_digest}.json")


def champions(key: str) -> str:
    """The folder of the champion claims; `key` identifies the registered model and the MLflow."""
    return f"champions/{key}/"


def job(job_id: str, step: str = "") -> str:
    """The outcome of a step in one execution of the DAG, or the folder of all its steps."""
    return f"jobs/{job_id}/{step}.json" if step else f"jobs/{job_id}/"


def step_log(job_id: str, step: str = "", stream: str = "", name: str = "") -> str:
    """A piece of the output of a step's process, or the folder of the process. Also the folder of the step (or one part
    of it), or of the whole job (an execution of the DAG)."""
    return f"logs/{job_id}/" + "".join([f"{part}/" for part in (step, stream) if part]) + name


def sweep(sweep_id: str, name: str) -> str:
    """A file of a sweep."""
    return f"sweeps/{sweep_id}/{name}"


def trigger(name: str, key: str) -> str:
    """The decision whether a retraining of the spec `name` is due; `key` identifies the inputs."""
    return f"triggers/{name}/{key}.json"


def submission(digest: str) -> str:
    """The contexts that may have the run of a request."""
    return f"submissions/{digest}.json"
