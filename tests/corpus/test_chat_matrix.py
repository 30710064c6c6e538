"""Conversations have the tokens of transformers' `apply_chat_template`, and exactly the answers count, over a matrix of
templates, tokenizers and conversations.
"""

import itertools
import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from holdfast.corpus.chat import ChatEncoder, ChatTemplate, ConversationError, conversation_text, pair_text
from holdfast.dataset.vocabulary import ENDS, ID, UNCOUNTED

SPECIAL = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<pad>", "sep_token": "<|sep|>"}
OTHERS = ["<|im_start|>", "<|start|>", "<|end|>", "<|eot|>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>"]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{- bos_token }}\n{%- for m in messages %}\n    {{- '<|start|>' + m.role + '<|end|>\n\n' }}\n"
    "    {%- if m.role == 'assistant' %}\n        {%- generation %}{{- (m.content or '') | trim + '<|eot|>' }}"
    "{%- endgeneration %}\n    {%- else %}\n        {{- m.content | trim + '<|eot|>' }}\n    {%- endif %}\n"
    "{%- endfor %}{% if add_generation_prompt %}{{- '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{% generation %}{{ ' ' + m['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '\n\n' }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' }}{% if role == 'model' %}{% generation %}{{ m['content'] | trim }}"
    "{{ '<end_of_turn>\n' }}{% endgeneration %}{% else %}{{ m['content'] | trim + '<end_of_turn>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ 'Assistant: ' }}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}{{ '\n' }}{% else %}{{ 'User: ' + m['content'] + '\n' }}{% endif %}{% endfor %}"
)
TOOLS = (
    "{% if documents %}{% for d in documents %}{{ d['title'] + ': ' + d['text'] + sep_token }}"
    "{% endfor %}{% endif %}{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson(indent=2) }}"
    "{{ '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{% if m.reasoning_content is defined and thinking is not false %}"
    "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content or '' }}{% if m.tool_calls is defined %}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% for k, v in c.items() %}{{ k }}{% endfor %}{% endfor %}"
    "{% endif %}{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content | string + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}"
)
NAMED = {"default": LLAMA, "tool_use": TOOLS}
TEMPLATES: dict[str, Any] = {
    "chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "gemma": GEMMA, "plain": PLAIN, "tools": TOOLS,
    "named": NAMED,
}  # fmt: skip

USER = {"role": "user", "content": "hello?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "the weather é",
        "parameters": {"type": "object", "properties": {"unit": {"type": "string"}, "city": {"type": "string"}}},
    },
}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"unit": "c", "city": "Oslo"}}}
ANSWERS = ["Yes", "Yes, it is.", "\n\nYes.\n", "  No  ", "", "🙂 äöü 你好", "é\u0301", "<|im_end|> no"]


def tool_talk(**more: object) -> dict[str, object]:
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "name": "get_weather", "content": '{"z": 1, "a": -3}'}
    return {"messages": [USER, answer, result, {"role": "assistant", "content": "It is cold."}], **more}


CONVERSATIONS: list[dict[str, Any]] = [
    *({"messages": [USER, {"role": "assistant", "content": one}]} for one in ANSWERS),
    *(
        {"messages": [{"role": "system", "content": " Be\nbrief. "}, USER, {"role": "assistant", "content": one},
                      {"content": "  \n and?", "role": "user"}, {"role": "assistant", "content": other}]}
        for one, other in itertools.pairwise(ANSWERS)
    ),
]  # fmt: skip
TOOL_CONVERSATIONS: list[dict[str, Any]] = [
    tool_talk(),
    tool_talk(tools=[TOOL]),
    tool_talk(tools=[]),
    tool_talk(tools=None),
    tool_talk(tools=[TOOL, {"z": 1, "a": {"y": 2, "b": [True, None, 1.5]}}], documents=[{"title": "t", "text": "x"}]),
    tool_talk(documents=[{"text": "x", "title": "t"}], chat_template_kwargs={"thinking": False, "sep_token": "\n"}),
    {"messages": [USER, {"role": "assistant", "content": "Yes", "thinking": "hm", "reasoning": None}]},
    {"messages": [USER, {"role": "assistant", "content": "Yes", "reasoning": "hm"}],
     "chat_template_kwargs": {"thinking": False}},
]  # fmt: skip


@cache
def tokenizer_json(style: str) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if style == "split":
        rule = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(rule, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=520, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[*SPECIAL.values(), *OTHERS],
    )  # fmt: skip
    text = "Yes, it is.\n\n No, it is not.\n\nhello world  \n\n\n Assistant: Yes User: No Assistant: Yes, it is \n"
    tokenizer.train_from_iterator([text] * 200, trainer)
    if style.startswith("trim"):
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=style == "trimmed")
    return str(tokenizer.to_str())


STYLES = ["none", "split", "trimmed"]


def template(kind: Any) -> ChatTemplate:
    if isinstance(kind, dict):
        return ChatTemplate(kind["default"], SPECIAL, {"tool_use": kind["tool_use"]})
    return ChatTemplate(kind, SPECIAL)


def encoded(style: str, kind: Any, talk: dict[str, Any]) -> np.ndarray:
    text = conversation_text(json.loads(json.dumps(talk)))
    assert text is not None
    return np.frombuffer(ChatEncoder(tokenizer_json(style), template(kind), 0).encode(text), "<u4")


def of_transformers(style: str, kind: Any, talk: dict[str, Any]) -> list[int]:
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer_json(style)), **SPECIAL)
    fast.chat_template = kind
    return fast.apply_chat_template(
        talk["messages"], tools=talk.get("tools"), documents=talk.get("documents"), tokenize=True, return_dict=True,
        **talk.get("chat_template_kwargs", {}),
    )["input_ids"]  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_are_those_of_transformers(style: str, name: str) -> None:
    talks = TOOL_CONVERSATIONS if name in ("tools", "named") else CONVERSATIONS
    compared = 0
    for talk in talks:
        try:
            ours = encoded(style, TEMPLATES[name], talk)
        except ConversationError as error:
            silent = not any(message.get("content") for message in talk["messages"] if message["role"] == "assistant")
            assert "says nothing" in str(error) and silent, (talk, error)
            continue
        assert (ours & ID).tolist() == of_transformers(style, TEMPLATES[name], talk), talk
        compared += 1
    assert compared > len(talks) - 3


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_token_counts_if_and_only_if_one_of_its_characters_is_the_assistants(style: str, name: str) -> None:
    """The test finds the characters without offsets: it decodes each token to bytes and concatenates them."""
    tokenizer = Tokenizer.from_str(tokenizer_json(style))
    letters = {letter: byte for byte, letter in enumerate(byte_letters())}
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for talk in TOOL_CONVERSATIONS if name in ("tools", "named") else CONVERSATIONS:
        chat = template(TEMPLATES[name])
        ((text, spans, _),) = chat.rendered(conversation_text(talk) or "")
        counts = np.zeros(len(text.encode()), dtype=bool)
        for first, last in spans:
            counts[len(text[:first].encode()) : len(text[:last].encode())] = True
        try:
            ours = encoded(style, TEMPLATES[name], talk)
        except ConversationError:
            assert not counts.any()
            continue
        at = 0
        for number, token in enumerate(ours.tolist()):
            piece = tokenizer.id_to_token(token & ID)
            assert piece is not None
            raw = piece.encode() if piece in added else bytes(letters[letter] for letter in piece)
            begin, end = at, at + len(raw)
            assert text.encode()[begin:end] == raw
            while begin and text.encode()[begin] & 0xC0 == 0x80:  # a part of a character stands for the whole character
                begin -= 1
            while end < len(counts) and text.encode()[end] & 0xC0 == 0x80:
                end += 1
            assert (not token & UNCOUNTED) == bool(counts[begin:end].any() and number), (talk, number, piece)
            at += len(raw)
        assert at == len(counts)


def byte_letters() -> list[str]:
    """The letter that byte-level tokenizers use for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


@pytest.mark.parametrize("style", STYLES)
def test_the_first_word_of_an_answer_counts_where_its_token_begins_before_it(style: str) -> None:
    unmarked = PLAIN.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    prompted = unmarked + "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
    tokenizer = Tokenizer.from_str(tokenizer_json(style))
    for kind in (PLAIN, prompted):
        ours = encoded(style, kind, {"messages": [USER, {"role": "assistant", "content": "Yes"}]})
        counted = tokenizer.decode((ours[(ours & UNCOUNTED) == 0] & ID).tolist())
        assert counted.strip() == "Yes"
    pair = pair_text({"prompt": "Assistant: ", "chosen": "Yes", "rejected": "No"})
    raw = np.frombuffer(ChatEncoder(tokenizer_json(style), template(""), 1).encode(pair or ""), "<u4")
    chosen, rejected = np.split(raw, np.flatnonzero(raw & ENDS)[:-1] + 1)
    for document, word in ((chosen, "Yes"), (rejected, "No")):
        text = tokenizer.decode((document[(document & UNCOUNTED) == 0] & ID).tolist(), skip_special_tokens=False)
        assert text.strip() == f"{word}<|im_end|>"


@pytest.mark.parametrize("key", ["tools", "documents"])
@pytest.mark.parametrize("form", ["text", "list of texts"])
def test_json_text_is_parsed(key: str, form: str) -> None:
    value = [{**TOOL, "title": "t", "text": "x"}]
    argument = json.dumps(value) if form == "text" else [json.dumps(item) for item in value]
    assert conversation_text(tool_talk(**{key: argument})) == conversation_text(tool_talk(**{key: value}))
    assert conversation_text(tool_talk(**{key: " "})) == conversation_text(tool_talk())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tools": "get_weather"}, "its 'tools' are text that is not JSON"),
        ({"tools": "{}"}, "its 'tools' are no list of JSON objects"),
        ({"tools": {"name": "x"}}, "its 'tools' are no list of JSON objects"),
        ({"tools": [1]}, "its 'tools' are no list of JSON objects"),
        ({"tools": 7}, "its 'tools' are no list of JSON objects"),
        ({"documents": "[[]]"}, "its 'documents' are no list of JSON objects"),
        ({"chat_template_kwargs": [1]}, "its 'chat_template_kwargs' are no JSON object"),
        ({"chat_template_kwargs": {"messages": []}}, "set 'messages', which is no option of a template"),
    ],
)
def test_invalid_template_arguments_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversationError, match=message):
        conversation_text(tool_talk(**more))
    with pytest.raises(ConversationError, match=message):
        pair_text({"prompt": [USER], "chosen": [USER], "rejected": [{**USER, "content": "x"}], **more})


def test_pairs_keep_the_order_of_tools_too() -> None:
    record: dict[str, Any] = {
              "prompt": [USER], "chosen": [{"role": "assistant", "content": "Yes"}],
              "rejected": [{"role": "assistant", "content": "No"}], "tools": [TOOL]}  # fmt: skip
    raw = np.frombuffer(ChatEncoder(tokenizer_json("none"), template(NAMED), 0).encode(pair_text(record) or ""), "<u4")
    chosen = np.split(raw, np.flatnonzero(raw & ENDS)[:-1] + 1)[0]
    talk = {"messages": record["prompt"] + record["chosen"], "tools": [TOOL]}
    assert (chosen & ID).tolist() == of_transformers("none", NAMED, talk)


def test_marks_inside_what_a_filter_changes_are_refused() -> None:
    inside = "{% filter upper %}{% generation %}{{ messages[1].content }}{% endgeneration %}{% endfilter %}"
    assert len(encoded("none", inside, CONVERSATIONS[0])) > 0
    template = "{% set x %}{% generation %}{{ ' ' + messages[1].content }}{% endgeneration %}{% endset %}{{ x | trim }}"
    with pytest.raises(ConversationError, match="changes text after"):
        encoded("none", template, CONVERSATIONS[0])
