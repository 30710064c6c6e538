"""Shown text contains no secrets, and nothing else is lost."""

import io
import json
import logging
import random
import re
import shlex
import sys
import time
from collections.abc import Callable
from urllib.parse import quote, quote_plus, unquote

import pytest

from holdfast.runtime.logs import configure_logging
from holdfast.runtime.output import redacted_output
from holdfast.runtime.secrets import HIDDEN, StreamRedactor, for_ranks, redact, secret_values
from holdfast.spec.errors import HoldfastError, Problem, SpecError
from holdfast.spec.redaction import carries_secret, names_secret
from holdfast.spec.redaction import text as redaction_text
from holdfast.steps.outcomes import Outcome

SECRET = "S3CR3Tvalue"
PEM = f"-----BEGIN RSA PRIVATE KEY-----\nMIIE{SECRET}\nabcd==\n-----END RSA PRIVATE KEY-----\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see http://a:b@host/x and s3://c@d/e", "see http://host/x and s3://d/e"),
        ("postgresql://me:p@ss@host/db", "postgresql://host/db"),
        ("https://host/x?X-Amz-Signature=abc&part=1", "https://host/x?X-Amz-Signature=(hidden)&part=1"),
        (
            "?X-Amz-Credential=AKIA%2F1&X-Amz-Security-Token=t",
            "?X-Amz-Credential=(hidden)&X-Amz-Security-Token=(hidden)",
        ),
        ("AWSAccessKeyId=AKIA secretAccessKey=s", "AWSAccessKeyId=(hidden) secretAccessKey=(hidden)"),
        ("AWS_SECRET_ACCESS_KEY=s AWS_SESSION_TOKEN=t", "AWS_SECRET_ACCESS_KEY=(hidden) AWS_SESSION_TOKEN=(hidden)"),
        ("https://host/c?sv=1&sig=a%2Fb", "https://host/c?sv=1&sig=(hidden)"),
        (f"Authorization: Bearer {SECRET}", "Authorization: Bearer (hidden)"),
        (f"AccountKey={SECRET}==;EndpointSuffix=x", "AccountKey=(hidden);EndpointSuffix=x"),
        (f"machine h login a password {SECRET}", "machine h login a password (hidden)"),
        (f"ann:{SECRET}@host:/x", "(hidden)@host:/x"),
        (f"{PEM}next", "-----BEGIN RSA PRIVATE KEY-----(hidden)\nnext"),
        (f"https://hooks.slack.com/services/T0/B0/{SECRET} refused", "https://hooks.slack.com/(hidden) refused"),
        (f"wandb: key {'0a' * 20}", "wandb: key (hidden)"),
        (f"GET https://host/?api%5Fkey={SECRET}&page=2", "GET https://host/?api%5Fkey=(hidden)&page=2"),
        (f"/login?next=%2Fa%3Fpassword%3D{SECRET}%26b%3D1", "/login?next=%2Fa%3Fpassword%3D(hidden)%26b%3D1"),
        (f"x%2Damz%2Dsecurity%2Dtoken%3d{SECRET}", "x%2Damz%2Dsecurity%2Dtoken%3d(hidden)"),
        ("/a?token%5Fids=12&max%2Dtokens%3D5", "/a?token%5Fids=12&max%2Dtokens%3D5"),
        (f"dop_v1_{'0a' * 32}", "(hidden)"),
        (f"AGE-SECRET-KEY-1{'QZ9' * 19}", "(hidden)"),
        (f"tskey-auth-{'aB3' * 8}", "(hidden)"),
        (f"shpat_{'0a' * 16} figd_{'aB3' * 8}", "(hidden) (hidden)"),
        (f"lin_api_{'aB3' * 8} sntryu_{'aB3' * 8} ATATT3{'aB3' * 16}", "(hidden) (hidden) (hidden)"),
        (f"glsa_{'aB3' * 10}_0a1b2c3d", "(hidden)"),
        (f"pplx-{'aB3' * 16} and xai-{'aB3' * 26}", "(hidden) and (hidden)"),
    ],
)
def test_secrets_are_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(shown) == shown


@pytest.mark.parametrize(
    "write",
    [str, repr, ascii, json.dumps, quote, quote_plus, shlex.quote, lambda value: quote(value, safe=""),
     lambda value: json.dumps(value, ensure_ascii=False), lambda value: json.dumps({"text": json.dumps(value)})],
)  # fmt: skip
@pytest.mark.parametrize("value", [f"{SECRET}\"it's", f"{SECRET}'s", f"a\\{SECRET} / \té"])
def test_the_value_of_a_variable_is_hidden_however_it_is_written(value: str, write: Callable[[str], str]) -> None:
    assert SECRET not in redact(f"it has {write(value)} in it", secret_values({"MY_PASSWORD": value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KFP_HEADER", f"X-Auth: {SECRET}"),
        ("KFP_HEADER", f"Authorization: Bearer {SECRET}=="),
        ("KFP_HEADER", f"api-key={SECRET}=="),
        ("KFP_HEADER", f"x-key: a8f7d9sd={SECRET}"),
        ("OTEL_EXPORTER_OTLP_HEADERS", f"Authorization=Basic%20{SECRET}%3D%3D"),
        ("OTEL_EXPORTER_OTLP_HEADERS", f"content-type=application/json,x-team={SECRET}"),
    ],
)
def test_the_value_of_a_variable_with_a_header_is_hidden_without_its_name(name: str, value: str) -> None:
    values = secret_values({name: value})
    assert SECRET not in redact(f"{name}={quote_plus(value)}", values)
    assert SECRET not in redact(f"sent {re.split('[:=]', unquote(value), maxsplit=1)[1].split()[-1]}", values)
    assert redact("application/json of X-Auth", values) == "application/json of X-Auth"


def test_a_variable_with_bytes_that_are_no_text_is_hidden() -> None:
    value = f"\udcff/{SECRET}+%"  # as `os.environ` decodes it
    for text in (value, repr(value), json.dumps(value), quote(value, errors="surrogateescape")):
        assert SECRET not in redact(text, secret_values({"MY_PASSWORD": value}))


def test_ranks_inherit_no_arguments_of_another_torchrun() -> None:
    variables = {"PET_RDZV_BACKEND": "etcd", "PET_NNODES": "2:4", "PETS": "cat", "PATH": "/bin"}
    assert for_ranks(variables) == {"PETS": "cat", "PATH": "/bin"}


FORMS = [
    "postgresql://ann:p/{}@db/x", "postgresql://ann:p {}@db/x", "postgresql://ann:p#{}@db/x", "https://a:p?{}@h/x",
    'https://ann:p"{}@host/x', "redis://:{}@h:6379/0", "https://{}@h/x", "fatal: '{}' https://oauth2:{}@gitlab.x/a.git/",
    '{{"AWS_SECRET_ACCESS_KEY": "{}"}}', "{{'password': '{}'}}", "password: {}", "  password: |\n    {}\n",
    'password="{}"', "token='{}'", "password: correct horse {}", 'pw="it\'s {}"', "it: '' password='o''x {}'",
    '\\"password\\": \\"{}\\"', "'api_key': b'{}'", "DB_PASSWORD=p,{}", "Uid=ann;Pwd={};Server=x", "PWD_DB={}",
    "Authorization: Basic {}", "-H 'Authorization: Token {}'", "{{'Authorization': ['Bearer {}']}}",
    "(b'authorization', b'Bearer {}')", "Set-Cookie: session={}; Path=/", "x-amz-security-token:{}", "X-Api-Key: {}",
    "--password {}", "--token={}", "['--password', '{}']", "curl -u ann:{} https://h", "HTTPBasicAuth('ann', '{}')",
    "WANDB_API_KEY={}", "export GH_PAT={}", "OPENAI_KEY: '{}'", "HF_TOKEN => {}", "SLACK_WEBHOOK=https://x/{}",
    "https://h/x?apikey={}", "https://h/x?key={}", "https://h/cb#access_token={}", "url=https://h/x?a=b&token={}",
    "api key: {}", "passwd={}", "client_secret={}", "clientSecret: {}", "<SecretAccessKey>{}</SecretAccessKey>",
    "//registry.npmjs.org/:_authToken={}", '{{"auths": {{"h": {{"auth": "{}"}}}}}}', "os.environ['HF_TOKEN'] = '{}'",
    "the password is {}", "IDENTIFIED BY '{}'", "bearer {}", "https://discord.com/api/webhooks/123/{}",
    "https://x.webhook.office.com/webhookb2/{}", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.{}",
]  # fmt: skip


@pytest.mark.parametrize("form", [form.replace("fatal: '{}' ", "fatal: ") for form in FORMS])
def test_every_form_of_a_named_secret_is_hidden(form: str) -> None:
    text = form.format(SECRET)
    assert SECRET not in redact(text)
    assert SECRET not in redact(json.dumps({"reason": text}))
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize(
    "key",
    [
        "hf_" + "a" * 34, "ghp_" + "a" * 36, "gho_" + "b" * 36, "github_pat_11" + "A" * 20 + "_" + "b" * 30,
        "AKIAIOSFODNN7EXAMPLE", "ASIA" + "A1" * 8, "glpat-" + "x" * 20, "sk-proj-" + "a1" * 20,
        "sk-ant-api03-" + "b2" * 20,
        "xoxb-123-456-abcdef", "xoxp-1-2-3abcdefg", "npm_" + "a" * 36, "AIza" + "b" * 35, "sk_live_" + "c" * 24,
    ],
)  # fmt: skip
def test_a_key_of_a_known_kind_is_redacted_at_any_position(key: str) -> None:
    for text in (key, f"it says '{key}' here", f"x={key}", f"/a/{key}/b", json.dumps([key])):
        assert key not in redact(text)


ORDINARY = [
    "https://host/x?mail=a@b", "sqlite:////a/b@c.db", "evaluation.max_tokens=100 data.tokenizer=x config=y", "a@b.c",
    "step 200 loss 3.21 tokens=512 tokens/s=12345 token_ids=[1,2] vocabulary=300 n_tokens: 12 token: 512",
    f"state_digest={'3b6a27bc' * 8} run 3f2a9c0b1d key runs/3f2a9c0b1d/checkpoints/step-200.json",
    "key=runs/3f2a/run.json cache_key=abc registration_key: 3f2aab12cd sort_key=None PRIMARY_KEY=id",
    "bos_token='<s>' eos_token: </s> \"unk_token\": \"<unk>\" special token: <|im_start|> unexpected token: ','",
    "http://127.0.0.1:5000/#/experiments/1 http://[::1]:80/x@y http://host:8080/path?mail=a@b",
    "registry.x/holdfast:1.2@sha256:00112233 git@github.com:org/repo.git ssh to node-7:29500",
    'secrets "holdfast-secrets" not found; secretRef: {name: holdfast-secrets, optional: true}',
    "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; check the bucket and the key",
    "spec:7:5: cluster.environment.DB_PASSWORD: is not text; password: required? the secret: not set",
    "export HF_TOKEN=$HF_TOKEN password=${PASSWORD} token={{ token }} password=None --token FILE",
    "PATH=/usr/bin PWD=/home/x OLDPWD=/y SSH_AUTH_SOCK=/tmp/z AWS_WEB_IDENTITY_TOKEN_FILE=/var/run/token",
    "commit 0123456789abcdef0123456789abcdef01234567 task-0123456789abcdefghij risk-0123456789abcdefghij",
    "author=bob authority=x design=3 signature mismatch passed: 12 bypass=true forward pass: 3 secretary=bob",
    "rank 3@node-7: lost; node[1-4]:8; s3://bucket/datasets/ab12/train/00000.bin:tokens@3; token = next(tokens)",
    '{"metadata": {"total_size": 1234}, "weight_map": {"lm_head.weight": "x"}, "token": 5, "session": "abc"}',
    "cookie cutter; basic auth; Bearer authentication required; std::vector<token>: x  a::token::b",
]  # fmt: skip


@pytest.mark.parametrize("text", ORDINARY)
def test_everything_else_stays(text: str) -> None:
    assert redact(text, ()) == text


def test_json_stays_json() -> None:
    value = {"uri": 's3://me:"pw"@b/x', "text": 'token=abc"def'}
    assert json.loads(redact(json.dumps(value)))["text"] == 'token=(hidden)"def'
    random_ = random.Random(7)
    pieces = [*(form.format(SECRET) for form in FORMS if form.count("{}") == 1), *ORDINARY, PEM, "\\", '"', "\n", "'"]
    for _ in range(500):
        words = [random_.choice(pieces) for _ in range(4)]
        document = {
            "password": random_.choice([1234567, SECRET, None, True, [SECRET]]),
            "text": " ".join(words),
            "n": words,
        }
        for text in (json.dumps(document), json.dumps(document, indent=1), json.dumps({"x": json.dumps(document)})):
            json.loads(redact(text))


def test_the_time_grows_with_the_length_and_not_with_its_square() -> None:
    """For 200 kB of hostile text, quadratic time would be minutes."""
    parts = "://a:~@~password='~password=\\\"~<a>~-----BEGIN PRIVATE KEY-----~eyJa.~--token ~://a:b c ~key: ~x.-~a@~\\"
    for part in [*parts.split("~"), "password:|\n a\n", "password=a;b ", "login a password "]:
        start = time.process_time()
        redact((part * 200_000)[:200_000], ())
        assert time.process_time() - start < 10, part


def test_values_of_variables_with_a_secret_name_are_hidden_verbatim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_WEBHOOK", "http://127.0.0.1:9/services/hooks-9f")
    monkeypatch.setenv("MY_SERVICE_PASSWORD", "plain words/42")
    monkeypatch.setenv("SOME_DB", "postgresql://ann:rather-long@db/x")
    monkeypatch.setenv("HF_TOKEN", "test")  # too short to distinguish from text
    text = redact(
        "posting to http://127.0.0.1:9/services/hooks-9f: plain words/42, plain%20words%2F42, rather-long, test"
    )
    assert text == f"posting to {HIDDEN}: {HIDDEN}, {HIDDEN}, {HIDDEN}, test"
    assert secret_values({"TOKENS": "123456789", "HF_HOME": "/data/hf-home"}) == ()


def test_a_secret_variable_is_redacted_once_set_and_examined_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text of every event is redacted, and a run of a month has millions."""
    names: list[str] = []

    def look(name: str) -> bool:
        names.append(name)
        return names_secret(name)

    monkeypatch.setattr(redaction_text, "names_secret", look)
    for password in ("first of two", "second of two"):
        monkeypatch.setenv("MY_SERVICE_PASSWORD", password)
        assert [redact(f"{number}: {password}") for number in range(50)] == [f"{n}: {HIDDEN}" for n in range(50)]
    monkeypatch.delenv("MY_SERVICE_PASSWORD")
    assert redact("second of two") == "second of two"
    assert names.count("MY_SERVICE_PASSWORD") == 2


def test_a_stream_is_redacted_line_by_line_and_a_key_across_lines() -> None:
    text = f"first\npassword: {SECRET}\n{PEM}last {SECRET[:3]}"
    for size in (1, 3, 50):
        redactor = StreamRedactor()
        pieces = [redactor.add(text[at : at + size]) for at in range(0, len(text), size)]
        redacted = "".join([*pieces, redactor.rest()])
        assert redacted.startswith("first\npassword: (hidden)\n-----BEGIN RSA PRIVATE KEY-----(hidden)")
        assert SECRET not in redacted and "abcd==" not in redacted and redacted.endswith(f"last {SECRET[:3]}")


def test_errors_logs_outcomes_and_prints_hold_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"postgresql://ann:p/{SECRET}@db/x"
    assert SECRET not in str(HoldfastError(f"{url}: no answer"))
    problem = Problem("data.sources.0.repo", f"https://ann:p/{SECRET * 20}@h/x", "is no repository", "name one")
    spec_error = SpecError([problem, Problem("model", {"password": SECRET}, "is not allowed", "remove it")])
    assert "S3CR3T" not in f"{spec_error}{problem.value}{spec_error.problems}"
    outcome = Outcome("train", 1, 0.0, reason=f"OperationalError: {url}")
    assert SECRET.encode() not in outcome.as_json()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        with redacted_output():
            configure_logging()
            try:
                raise RuntimeError(url)
            except RuntimeError:
                logging.getLogger("holdfast").exception("%s failed", url)
            print("password:", SECRET, file=sys.stderr)
    finally:
        root.handlers[:], root.level = handlers, level
    stderr = capsys.readouterr().err
    assert SECRET not in stderr
    assert "Traceback" in stderr


def test_a_stream_that_is_closed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with redacted_output():
        assert sys.stdout is None


@pytest.mark.parametrize(
    "url",
    [
        "s3://u:s@b/x", "https://u:p/w@h", "https://hooks.slack.com/services/S3CR3T", "https://h/x?S3CR3Tvalue",
        "https://h/x#token=s", "u:S3CR3T@h:r.git", "https://h/x;token=s", "s3://b/x?Sig=a", "https://token@h/r",
        "https://h/x?a=b", "ssh://git:pw1234@h/r", "s3://b/x?S3CR3TvalueS3CR3Tvalue", "https://h/hf_" + "a" * 34,
    ],
)  # fmt: skip
def test_urls_that_carry_a_secret_are_known(url: str) -> None:
    assert carries_secret(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/prefix", "s3://b/part-?.txt", "s3://b/part-0000?.parquet", "ssh://git@github.com/o/r",
        "git@github.com:o/r.git", "https://github.com/o/r", "text/t?.txt", "data/a=b/c.txt", "file:///data/a:b@c/x",
        "hf://datasets/a/b@main", "/data/x", "expandable_segments:True", "http://127.0.0.1:9000/x", "a b c",
    ],
)  # fmt: skip
def test_urls_and_paths_without_a_secret_are_allowed(url: str) -> None:
    assert not carries_secret(url)


def test_names_of_secrets_are_known() -> None:
    secret = (
        "GH_PAT PRIVATE_KEY SLACK_WEBHOOK OPENAI_KEY AUTH DB_URL WANDB_API_KEY PGPASSWORD HF_TOKEN SAS DATABASE_URI"
    )
    secret += (
        " AWS_SESSION_TOKEN AWS_ACCESS_KEY_ID client-secret apiKey SENTRY_DSN NPM_TOKEN MYSQL_PWD SSH_KEY_2 DB_PASS"
    )
    assert [name for name in secret.split() if not names_secret(name)] == []
    ordinary = "TOKENS TOKENIZERS_PARALLELISM PATH PWD SSH_AUTH_SOCK HF_HOME NCCL_DEBUG BOS_TOKEN CACHE_KEY MAX_TOKENS"
    ordinary += (
        " AWS_WEB_IDENTITY_TOKEN_FILE AWS_ENDPOINT_URL KEYBOARD AUTHOR MLFLOW_TRACKING_URI key token_ids PATTERN"
    )
    assert [name for name in ordinary.split() if names_secret(name)] == []
