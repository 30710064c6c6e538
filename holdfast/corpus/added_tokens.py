"""Tokens that the files next to a tokenizer.json add to it. `transformers` gives each of them an id when it loads the
files, so a tokenizer.json without them encodes other tokens.
"""

from typing import Any

from holdfast.corpus.chat import LEGACY, ChatTemplate, read_settings, with_legacy_tokens
from holdfast.corpus.encode import load_tokenizer
from holdfast.spec.errors import DataError

ADDED = "added_tokens.json"
FIELD = "data.tokenizer.path"


def require_added_tokens(path: str, tokenizer_json: str, template: ChatTemplate) -> None:
    """Refuse a tokenizer.json that lacks tokens which the files next to it add. A token such as `pad_token` counts
    only if the template uses it. Raises DataError."""
    folder = path.rpartition("/")[0]
    place = f"{folder}/" if folder else ""
    settings = with_legacy_tokens(
        read_settings(f"{place}tokenizer_config.json", FIELD), lambda: read_settings(f"{place}{LEGACY}", FIELD)
    )
    decoder = settings.get("added_tokens_decoder")
    added = list(decoder.values()) if isinstance(decoder, dict) else [*read_settings(f"{place}{ADDED}", FIELD)]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        listed = settings.get(name)
        added += listed if isinstance(listed, list) else listed.values() if isinstance(listed, dict) else []
    written = "".join((template.text, *template.named.values()))
    used = {token for name, token in template.specials.items() if token and (name in written or token in written)}
    known = {token.content for token in load_tokenizer(tokenizer_json).get_added_tokens_decoder().values()}
    declared = {token for entry in added if (token := _content(entry))}
    if missing := sorted((declared | used) - known):
        raise DataError(
            f"{FIELD}: {path} lacks {', '.join(map(repr, missing[:4]))}, which the files next to it add; load them "
            "with transformers, and name the tokenizer.json that its save_pretrained writes"
        )


def _content(entry: Any) -> str | None:
    """The text of an added token, which is a text or an object with it."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else None
