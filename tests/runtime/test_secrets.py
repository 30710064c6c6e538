"""What is shown carries no secrets, and nothing else is lost."""

from __future__ import annotations

import json

import pytest

from holdfast.components.runtime.secrets import redact


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
    ],
)
def test_secrets_are_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(shown) == shown


@pytest.mark.parametrize(
    "text",
    ["https://host/x?mail=a@b", "sqlite:////a/b@c.db", "evaluation.max_tokens=100 data.tokenizer=x config=y", "a@b.c"],
)
def test_everything_else_stays(text: str) -> None:
    assert redact(text) == text


def test_json_stays_json() -> None:
    value = {"uri": 's3://me:"pw"@b/x', "said": 'token=abc"def'}
    assert json.loads(redact(json.dumps(value)))["said"] == 'token=(hidden)"def'
