"""The bugs that are planted: small mistakes of the kind that people make, each with the tests that must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """`old` stands exactly once in `file` and becomes `new`; then one of `tests` must fail, because of `why`."""

    file: str
    old: str
    new: str
    tests: str  # paths for pytest, by spaces
    why: str


_DATASET = "tests/dataset"
_CHECKPOINT = "tests/checkpoint"
_ENGINES = "tests/train/test_engines.py tests/golden"
_FILE_STORE = "tests/store/test_file.py tests/store/test_contract.py"
_S3 = "tests/store/test_s3_faults.py tests/store/test_contract.py"
_EVALUATE = "tests/evaluate"
_KUBERNETES = "tests/launch/kubernetes/test_classify.py tests/launch/kubernetes/test_launcher.py"

BUGS = [
    # --- which samples form a step
    Bug(
        "components/dataset/permutation.py",
        "ROUNDS = 6",
        "ROUNDS = 4",
        f"{_DATASET} tests/golden",
        "another permutation is another model",
    ),
    Bug(
        "components/dataset/permutation.py",
        "outside = value >= np.uint64(self.n)\n        while",
        "outside = value > np.uint64(self.n)\n        while",
        _DATASET,
        "one place would go beyond the range",
    ),
    Bug(
        "components/dataset/permutation.py",
        "low ^ self._keys[number])",
        "low)",
        _DATASET,
        "every seed would shuffle alike",
    ),
    Bug(
        "components/dataset/batches.py",
        "window is None or window[0] != number",
        "window is None",
        _DATASET,
        "a stale window: step 512 at batch 8 would equal step 0",
    ),
    Bug(
        "components/dataset/batches.py",
        "stream.locate(start[chosen], self.context + 1)",
        "stream.locate(start[chosen], self.context)",
        _DATASET,
        "the last target of a shard would be read beyond it",
    ),
    Bug(
        "components/dataset/batches.py",
        "start = sample * self.context",
        "start = sample * (self.context + 1)",
        _DATASET,
        "samples share their end tokens: otherwise tokens are left out",
    ),
    Bug(
        "components/dataset/mixture.py",
        "+ block * self._quotas[source]",
        "",
        _DATASET,
        "each block would repeat the samples of the first",
    ),
    Bug(
        "components/dataset/mixture.py",
        "derive_key(seed, purpose, epoch)",
        "derive_key(seed, purpose, 0)",
        _DATASET,
        "every epoch in one order",
    ),
    Bug(
        "components/dataset/mixture.py",
        'side="right") - 1\n        return source, sample',
        'side="left") - 1\n        return source, sample',
        _DATASET,
        "the first sample of a source would belong to another",
    ),
    Bug(
        "components/dataset/stream.py",
        "max(0, (self.tokens - 1) // context)",
        "max(0, self.tokens // context)",
        _DATASET,
        "a sample whose last target does not exist",
    ),
    Bug(
        "components/dataset/stream.py",
        "pending, at = [], end + 1",
        "pending, at = [], end",
        _DATASET,
        "a document would begin with the end of the one before",
    ),
    # --- checkpoints
    Bug(
        "components/checkpoint/reader.py",
        "if content_digest(part) != piece.digest:\n                    _read_again",
        "if False:\n                    _read_again",
        _CHECKPOINT,
        "damage would be loaded silently",
    ),
    Bug(
        "components/checkpoint/retention.py",
        "match and match[1] not in reached and int(match[2]) <= attempt.number",
        "match and match[1] not in reached",
        _CHECKPOINT,
        "a replaced writer would delete its successor's packs",
    ),
    Bug(
        "components/checkpoint/retention.py",
        "kept = sorted({*retention.kept(steps), committed})",
        "kept = sorted(retention.kept(steps))",
        _CHECKPOINT,
        "the checkpoint just committed could go",
    ),
    Bug(
        "components/checkpoint/retention.py",
        "set(ordered[-self.keep_last :])",
        "set(ordered[: self.keep_last])",
        _CHECKPOINT,
        "the oldest would stay instead of the newest",
    ),
    Bug(
        "components/checkpoint/retention.py",
        "step % self.keep_every == 0}",
        "step % self.keep_every == 1}",
        _CHECKPOINT,
        "milestones would be deleted",
    ),
    Bug(
        "components/checkpoint/attempts.py",
        "if number > self.number and",
        "if number > self.number + 1 and",
        _CHECKPOINT,
        "the direct successor would not fence off",
    ),
    Bug(
        "components/checkpoint/attempts.py",
        ' get("launch", 0) >= self.launch'.strip(),
        'get("launch", 0) > self.launch',
        _CHECKPOINT,
        "a newer gang of one launch would not replace the older",
    ),
    Bug(
        "components/checkpoint/writer.py",
        "self._require_packs(manifest)\n",
        "",
        _CHECKPOINT,
        "a manifest of packs that are gone could be committed",
    ),
    Bug(
        "components/checkpoint/writer.py",
        "_require_finite(step, piece)\n",
        "pass\n",
        f"{_CHECKPOINT} tests/train/test_worker.py",
        "a state with NaN would be saved over the last good one",
    ),
    Bug(
        "components/checkpoint/writer.py",
        "start += len(data)",
        "start += 0",
        _CHECKPOINT,
        "every piece of a pack would be said to lie at its beginning",
    ),
    Bug(
        "components/checkpoint/box.py",
        "low, high = max(start, other_start), min(start + size, other_start + other_size)",
        "low, high = max(start, other_start), max(start + size, other_start + other_size)",
        _CHECKPOINT,
        "boxes that do not meet would seem to",
    ),
    Bug(
        "components/checkpoint/box.py",
        "offset = (self.offset[0] + start, *self.offset[1:])",
        "offset = (start, *self.offset[1:])",
        f"{_CHECKPOINT} {_ENGINES}",
        "a sharded tensor would be saved over its first shard",
    ),
    Bug(
        "components/checkpoint/manifest.py",
        "if claimed != _digest(body):",
        "if False:",
        _CHECKPOINT,
        "a changed manifest would be believed",
    ),
    Bug(
        "components/checkpoint/manifest.py",
        "return any(end > start for (_, end), (start, _) in pairwise(spans))",
        "return False",
        _CHECKPOINT,
        "pieces that overlap leave a hole elsewhere",
    ),
    # --- training
    Bug(
        "components/train/schedule.py",
        "peak * (step + 1) / schedule.warmup_steps",
        "peak * step / schedule.warmup_steps",
        "tests/train/test_schedule.py",
        "the first step would learn nothing",
    ),
    Bug(
        "components/train/schedule.py",
        "training.steps - 1 - schedule.warmup_steps",
        "training.steps - schedule.warmup_steps",
        "tests/train/test_schedule.py",
        "the last step would not reach the final rate",
    ),
    Bug(
        "components/train/randomness.py",
        r"\0{step}\0{rank}",
        r"\0{rank}",
        "tests/train tests/golden",
        "the same random numbers in every step",
    ),
    Bug(
        "components/train/loop.py",
        "done == training.steps or leaving",
        "leaving",
        "tests/train/test_worker.py tests/train/test_step.py",
        "the last step would not be saved",
    ),
    Bug(
        "components/train/observers.py",
        "if not (math.isfinite(loss) and math.isfinite(norm)):",
        "if math.isnan(loss):",
        "tests/train",
        "an infinite norm would be taken for training",
    ),
    Bug(
        "components/train/observers.py",
        'if row["step"] <= step]',
        'if row["step"] <= step + 1]',
        "tests/train",
        "rows of steps that no checkpoint covers would be written",
    ),
    # --- the model
    Bug(
        "components/model/initialise.py",
        "math.sqrt(2 * model.layers)",
        "math.sqrt(model.layers)",
        "tests/model tests/golden",
        "the residual stream would grow with depth",
    ),
    Bug(
        "components/model/initialise.py",
        'f"initialise\\0{seed}\\0{name}\\0{block}"',
        'f"initialise\\0{seed}\\0{name}"',
        "tests/model",
        "the blocks of a large tensor would be equal",
    ),
    Bug(
        "components/model/decoder.py",
        "torch.cat((-second, first), dim=-1)",
        "torch.cat((second, first), dim=-1)",
        "tests/model",
        "no rotation",
    ),
    Bug(
        "components/model/decoder.py",
        "ends_BT.cumsum(dim=1) - ends_BT.long()",
        "ends_BT.cumsum(dim=1)",
        "tests/model",
        "an end-of-text token is part of what it ends",
    ),
    Bug(
        "components/model/decoder.py",
        "document_BT[:, None, None, :]).tril()",
        "document_BT[:, None, None, :])",
        "tests/model",
        "attention would see the future",
    ),
    # --- the store
    Bug(
        "components/store/file.py",
        "                    write(descriptor)\n                    os.fsync(descriptor)",
        "                    write(descriptor)",
        _FILE_STORE,
        "an object could be empty after a loss of power",
    ),
    Bug(
        "components/store/file.py",
        "move(temporary, path)\n        sync_folder(path.parent)",
        "move(temporary, path)",
        _FILE_STORE,
        "an object could be gone after a loss of power",
    ),
    Bug(
        "components/store/file.py",
        "            if current != expected:",
        "            if False:",
        _FILE_STORE,
        "two writers would both win",
    ),
    Bug(
        "components/store/file.py",
        "if start + length > size:",
        "if start > size:",
        _FILE_STORE,
        "a truncated object would be read as if it were whole",
    ),
    Bug(
        "components/store/file.py",
        "if leftover.stat().st_mtime < oldest:",
        "if True:",
        _FILE_STORE,
        "the files of living writers would be removed",
    ),
    Bug(
        "components/store/s3_errors.py",
        "redact(str(error.response.get('Error', {}).get('Message', '')))",
        "str(error.response.get('Error', {}).get('Message', ''))",
        _S3,
        "a reply may quote what was signed",
    ),
    Bug(
        "components/store/s3_errors.py",
        "RETRYABLE_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}",
        "RETRYABLE_STATUS = {408, 409, 425, 429, 500, 502, 504}",
        _S3,
        "a busy S3 would end a run for good",
    ),
    Bug(
        "components/store/s3_errors.py",
        "if status in (401, 403):",
        "if status == 401:",
        _S3,
        "a refusal is named with its remedy",
    ),
    # --- spec and identity
    Bug(
        "components/spec/identity.py",
        'asked["document_masks"] = spec.data.document_masks',
        "pass",
        "tests/spec",
        "two runs that differ would share an id",
    ),
    Bug("components/spec/identity.py", '"salt": salt', '"salt": ""', "tests/spec", "--fresh would find the old run"),
    Bug(
        "components/spec/section.py",
        'return role or "identity"',
        'return role or "neither"',
        "tests/spec",
        "a forgotten word would drop a field from the identity",
    ),
    Bug(
        "components/spec/rules.py",
        "if spec.training.schedule.warmup_steps >= spec.training.steps:",
        "if spec.training.schedule.warmup_steps > spec.training.steps:",
        "tests/spec",
        "a warm-up as long as the run",
    ),
    Bug(
        "components/spec/rules.py",
        "if any(weighted) and not all(weighted):",
        "if not any(weighted):",
        "tests/spec",
        "a source without a weight among others",
    ),
    Bug(
        "components/spec/plan.py",
        'if determinism != "off" and not replan:',
        "if not replan and False:",
        "tests/spec tests/train",
        "other software would silently go on with a run that promises bits",
    ),
    Bug(
        "components/spec/plan.py",
        "if segments and segments[-1].fingerprint == plan.fingerprint:\n        return tuple",
        "if segments:\n        return tuple",
        "tests/spec tests/train tests/checkpoint",
        "a change of plan would leave no trace",
    ),
    Bug(
        "components/spec/strict_yaml.py",
        "if key_node.value in seen:",
        "if False:",
        "tests/spec",
        "a key that stands twice",
    ),
    # --- the text
    Bug(
        "components/corpus/cleaning.py",
        "if len(text) > rules.max_characters:",
        "if len(text) >= rules.max_characters:",
        "tests/corpus",
        "the bound itself is allowed",
    ),
    Bug(
        "components/corpus/cleaning.py",
        "1 - len(set(lines)) / len(lines)",
        "len(set(lines)) / len(lines)",
        "tests/corpus",
        "the good documents would be dropped",
    ),
    Bug(
        "components/corpus/encode.py",
        "tokenizer.encode_special_tokens = True",
        "tokenizer.encode_special_tokens = False",
        "tests/corpus",
        "a text could end a document by spelling a special token",
    ),
    Bug(
        "components/corpus/encode.py",
        r"|[\t-\r ]+(?![^\t-\r ])|",
        "|",
        "tests/corpus",
        "other words than the tokenizer's own",
    ),
    # --- the verdict and the register
    Bug(
        "components/evaluate/verdict.py",
        "passed = value < bound  # False for NaN",
        "passed = not value >= bound",
        _EVALUATE,
        "NaN would bless",
    ),
    Bug(
        "components/evaluate/verdict.py",
        "theirs * (1 + settings.champion_tolerance)",
        "theirs * (1 - settings.champion_tolerance)",
        _EVALUATE,
        "an equal model would be refused",
    ),
    Bug(
        "components/evaluate/verdict.py",
        '"blessed" if all(check.passed',
        '"blessed" if any(check.passed',
        _EVALUATE,
        "one condition would be enough",
    ),
    Bug(
        "components/register/registration.py",
        'if verdict.get("word") != BLESSED:',
        "if False:",
        "tests/register",
        "a model without a blessing would be registered",
    ),
    Bug(
        "components/register/registration.py",
        'if store.stat(result["checkpoint"]) is None:',
        "if False:",
        "tests/register",
        "a model without its lineage would be registered",
    ),
    Bug(
        "components/register/registration.py",
        "if now is None or now.run_id == run_id:",
        "if True:",
        "tests/register",
        "a champion that nobody compared with would be replaced",
    ),
    Bug(
        "components/trigger/decision.py",
        "due = not (math.isfinite(decay.share) and decay.share <= most)",
        "due = decay.share > most",
        "tests/trigger",
        "a champion that gives NaN would stay",
    ),
    Bug(
        "components/trigger/decision.py",
        "due = age_hours >= most",
        "due = age_hours > most",
        "tests/trigger",
        "the bound itself is due",
    ),
    # --- launching
    Bug(
        "components/launch/ending.py",
        "(code >= 128, code in consequences, code)",
        "(code in consequences, code)",
        "tests/launch",
        "among the codes of a gang the permanent one says why",
    ),
    Bug(
        "components/launch/ending.py",
        "return 128 - status if status < 0",
        "return -status if status < 0",
        "tests/launch",
        "a killed rank would look like one that ended for good",
    ),
    Bug(
        "components/launch/supervise.py",
        "if len(recent) >= restarts.budget:",
        "if len(recent) > restarts.budget:",
        "tests/launch/test_supervise.py",
        "one restart more than the budget",
    ),
    Bug(
        "components/launch/supervise.py",
        "> restarts.window_minutes * 60",
        "> restarts.window_minutes * 3600",
        "tests/launch/test_supervise.py",
        "old restarts would count",
    ),
    Bug(
        "components/launch/warm.py",
        "os.setsid()",
        "pass",
        "tests/launch/test_warm.py",
        "a signal to a rank's group would reach others",
    ),
    Bug(
        "components/launch/warm.py",
        "        os.environ.clear()\n",
        "",
        "tests/launch/test_warm.py",
        "variables of the server would reach its processes",
    ),
    Bug(
        "components/launch/kubernetes/owner.py",
        'or found["metadata"]["uid"] != self.uid or',
        "or",
        "tests/launch/kubernetes/test_owner.py",
        "a new workflow of the old name would keep the job of one that is gone",
    ),
    Bug(
        "components/launch/kubernetes/owner.py",
        'spec.get("activeDeadlineSeconds") == 0 or ended',
        "ended",
        "tests/launch/kubernetes",
        "a run that was ended in KFP would go on training",
    ),
    Bug(
        "components/launch/kubernetes/classify.py",
        'if reason == "OOMKilled":',
        "if False:",
        _KUBERNETES,
        "lack of memory has a remedy",
    ),
    Bug(
        "components/launch/kubernetes/classify.py",
        "code in _BAD_NODE_CODES and not disruption",
        "code in _BAD_NODE_CODES",
        _KUBERNETES,
        "a node would be blamed for what the cluster asked",
    ),
    Bug(
        "components/launch/kubernetes/lease.py",
        'if holder in ("", self._me):\n            return True',
        "if True:\n            return True",
        "tests/launch/kubernetes",
        "two launchers would follow one run",
    ),
    # --- what people see
    Bug(
        "components/runtime/secrets.py",
        'r"(?i)((?:signature|',
        'r"((?:signature|',
        "tests/runtime",
        "AWS writes X-Amz-Signature",
    ),
    Bug(
        "components/runtime/exits.py",
        "return error.exit_code",
        "return ExitCode.UNEXPECTED",
        "tests/runtime",
        "retry policies read the code",
    ),
    Bug(
        "components/notify/failures.py",
        'node.get("finishedAt") or "~"',
        'node.get("finishedAt") or ""',
        "tests/notify",
        "a node that never ended would seem to have failed first",
    ),
]
