"""A conversation in the terminal: prompts of the template, seeds, and a context that fills up."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from holdfast.inference.batch import TokenSampling
from holdfast.inference.conversation import Conversation
from holdfast.inference.model import AnsweringModel, Ends, PromptError, TextStream
from holdfast.model.files import Folder
from holdfast.model.generate import generate
from holdfast.pipelines.cli import app
from holdfast.spec.errors import DataError
from tests.inference.tiny import tiny_export, tiny_model


def replies(conversation: Conversation, *texts: str) -> list[str]:
    answers = ["".join(conversation.reply(text)) for text in texts]
    conversation.close()
    return answers


def test_answers_follow_from_the_messages_and_the_seed(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny", context=512)

    def say(*texts: str, seed: int = 1, system: str = "") -> list[str]:
        return replies(
            Conversation(model, system=system, most_tokens=12, sampling=TokenSampling(1.0, seed=seed)), *texts
        )

    first, second = say("def add", "def add")
    assert say("def add", "def add") == [first, second]
    assert say("def add", seed=2) != [first]
    assert say("def add", system="the quick") != [first]
    greedy = replies(Conversation(model, most_tokens=12, sampling=TokenSampling(0)), "def add", "x")
    prompt = f"<user>def add</>\n<assistant>{greedy[0]}</>\n<user>x</>\n<assistant>"
    assert greedy[1] == generate(model.decoder, model.tokenizer, prompt, tokens=12, temperature=0)


def test_the_oldest_messages_are_forgotten_and_the_system_message_is_not(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny", context=128)
    conversation = Conversation(model, system="quick", most_tokens=30, sampling=TokenSampling(0))
    for _ in range(4):
        "".join(conversation.reply("the lazy dog"))
    assert conversation.forgotten
    assert conversation._messages[0] == {"role": "system", "content": "quick"}
    assert conversation._messages[1]["role"] == "user"
    with pytest.raises(PromptError, match="context is 128"):
        "".join(conversation.reply("ß" * 200))
    assert "".join(conversation.reply("again"))
    conversation.close()


def test_a_reply_that_is_closed_is_kept_as_far_as_it_was_read(tmp_path: Path) -> None:
    conversation = Conversation(tiny_model(tmp_path / "tiny"), most_tokens=100, sampling=TokenSampling(0))
    reply = conversation.reply("def add")
    read = next(reply) + next(reply)
    reply.close()  # type: ignore[attr-defined]
    assert conversation._messages[-1] == {"role": "assistant", "content": read}
    assert "".join(conversation.reply("x"))
    conversation.close()


def test_a_turn_ends_where_the_template_ends_it(tmp_path: Path) -> None:
    assert tiny_model(tmp_path / "text").turn_ends.text == ("</>",)
    folder = tiny_export(tmp_path / "token")
    template = (folder / "chat_template.jinja").read_text().replace("</>", "<|endoftext|>")
    (folder / "chat_template.jinja").write_text(template)
    model = AnsweringModel.load(Folder(folder), torch.device("cpu"))
    end = model.tokenizer.token_to_id("<|endoftext|>")
    assert end is not None and model.turn_ends == Ends(frozenset({end}))


def test_text_is_kept_back_while_it_may_begin_a_stop(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny")
    ids = model.tokenizer.encode("ä the quick brown").ids
    for stops, expected, stopped in ((("quiet",), "ä the quick brown", False), (("x", "ick"), "ä the qu", True)):
        stream, parts = TextStream(model.tokenizer, stops), []
        for token in ids:
            parts.append(stream.add(token))
            if stream.stopped:
                break
        assert ("".join(parts) + stream.finish(), stream.stopped) == (expected, stopped)


def test_the_command_answers_one_message(tmp_path: Path) -> None:
    folder = str(tiny_export(tmp_path / "tiny"))
    arguments = ["chat", folder, "--tokens", "10", "--temperature", "0", "--store", str(tmp_path / "store")]
    plain = CliRunner().invoke(app, [*arguments, "--message", "def add"])
    assert plain.exit_code == 0, plain.output
    assert CliRunner().invoke(app, arguments, input="def add\n").output == plain.output
    as_json = json.loads(CliRunner().invoke(app, [*arguments, "--json", "-m", "def add"]).output)
    assert as_json == {"message": "def add", "answer": plain.output.removesuffix("\n")}


def test_a_base_model_continues_text_and_reads_no_system_message(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "base", template=False)
    (text,) = replies(Conversation(model, most_tokens=9, sampling=TokenSampling(0)), "def add")
    assert text == generate(model.decoder, model.tokenizer, "def add", tokens=9, temperature=0)
    with pytest.raises(DataError, match="leave --system out"):
        Conversation(model, system="x", most_tokens=9, sampling=TokenSampling(0))
