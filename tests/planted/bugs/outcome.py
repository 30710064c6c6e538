"""What could go wrong from a finished run to the champion: export, verdict, registration, the next run."""

from __future__ import annotations

from tests.planted.bug import Bug

_EVALUATE = "tests/evaluate"

BUGS = [
    Bug(
        "holdfast/components/evaluate/checks.py",
        "passed = value < bound  # False for NaN",
        "passed = not value >= bound",
        _EVALUATE,
        "NaN would bless",
    ),
    Bug(
        "holdfast/components/evaluate/checks.py",
        "theirs * (1 + settings.champion_tolerance)",
        "theirs * (1 - settings.champion_tolerance)",
        _EVALUATE,
        "an equal model would be refused",
    ),
    Bug(
        "holdfast/components/evaluate/checks.py",
        '"blessed" if all(check.passed',
        '"blessed" if any(check.passed',
        _EVALUATE,
        "one condition would be enough",
    ),
    Bug(
        "holdfast/components/register/registration.py",
        'if verdict.get("word") != BLESSED:',
        "if False:",
        "tests/register",
        "a model without a blessing would be registered",
    ),
    Bug(
        "holdfast/components/register/registration.py",
        'if store.stat(result["checkpoint"]) is None:',
        "if False:",
        "tests/register",
        "a model without its lineage would be registered",
    ),
    Bug(
        "holdfast/components/register/registration.py",
        "if now is None or reached_against(verdict, now):",
        "if True:",
        "tests/register",
        "a champion that nobody compared with would be replaced",
    ),
    Bug(
        "holdfast/components/trigger/decision.py",
        "due = not (math.isfinite(decay.share) and decay.share <= most)",
        "due = decay.share > most",
        "tests/trigger/test_decision.py",
        "a champion that gives NaN would stay",
    ),
    Bug(
        "holdfast/components/trigger/decision.py",
        "due = age_hours >= most",
        "due = age_hours > most",
        "tests/trigger/test_decision.py",
        "the bound itself is due",
    ),
    Bug(
        "holdfast/components/notify/failures.py",
        'node.get("finishedAt") or "~"',
        'node.get("finishedAt") or ""',
        "tests/notify",
        "a node that never ended would seem to have failed first",
    ),
    Bug(
        "holdfast/scoring/models.py",
        "document_masks=_document_masks(store, champion)",
        "document_masks=False",
        _EVALUATE,
        "the champion is scored as it was trained",
    ),
    Bug(
        "holdfast/components/register/promotion.py",
        "        _apply(store, folder, number, model, uri)\n",
        "",
        "tests/register/test_promotion.py",
        "what a registration that died had claimed would be lost, and the next judged against the wrong champion",
    ),
    Bug(
        "holdfast/components/register/promotion.py",
        "if number and store.stat(_done(folder, number)) is None:",
        "if number:",
        "tests/register/test_promotion.py",
        "what a person chose since would be undone",
    ),
    Bug(
        "holdfast/components/register/promotion.py",
        '        promote(model, read_record(store, folder, last)["version"], store, uri)\n',
        "        break\n",
        "tests/register/test_promotion.py",
        "a slow registration would put back the champion before",
    ),
    Bug(
        "holdfast/components/register/promotion.py",
        "        require_fresh(now)\n",
        "",
        "tests/register/test_promotion.py tests/tracking/test_at_once.py",
        "of two models that were judged against one champion both would follow it",
    ),
    Bug(
        "holdfast/components/register/package.py",
        "return sorted(files, key=lambda path: path.name == MARKER)",
        "return files",
        "tests/register",
        "a model that is half described would count as whole",
    ),
    Bug(
        "holdfast/components/register/publish.py",
        'if store.url.startswith("s3://") or not registry_uri(uri).startswith("http"):',
        'if not registry_uri(uri).startswith("http"):',
        "tests/register/test_registration.py",
        "weights would go through an MLflow server although they lie in a bucket",
    ),
    Bug(
        "holdfast/components/train/export.py",
        "if there is None or known is None or known.version != there.version:",
        "if there is None:",
        "tests/train/test_export.py",
        "a file of another state, or one that was changed, would stay",
    ),
    Bug(
        "holdfast/components/train/export.py",
        '        return ExportRecord.parse(read_bounded(store, key, RECORD_BYTES), f"{store.url}/{key}")',
        "        return None",
        "tests/train/test_export.py",
        "an export that died would begin again",
    ),
    Bug(
        "holdfast/tracking/registrations.py",
        "        if ours != theirs:",
        "        if False:",
        _EVALUATE,
        "a champion whose tags were changed in MLflow would be an opponent",
    ),
    Bug(
        "holdfast/components/evaluate/step.py",
        'if spec.evaluation.unscorable_champion == "refuse":',
        "if False:",
        _EVALUATE,
        "a champion that cannot be scored would open the gate",
    ),
    Bug(
        "holdfast/model/verified.py",
        "            if blake3(part).hexdigest(length=_DIGEST_BYTES) != wanted:",
        "            if False:",
        "tests/train/test_export.py",
        "a damaged export would be read",
    ),
]
