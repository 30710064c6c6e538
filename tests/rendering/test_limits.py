"""Untrusted templates cost the caller neither memory nor time, and an error names the template."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from holdfast.corpus.chat import ChatTemplate, ConversationError
from holdfast.rendering import limits, process
from holdfast.rendering.process import RendererDiedError, Template, TemplateLimitError, TemplateRefusedError
from holdfast.spec.errors import ExitCode

RECORD = json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]})
HONEST = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
DOUBLING = "{% set n = namespace(t='ab') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}"
EXPONENTIAL = (
    "{% set n = namespace(a=[], b=[]) %}{% for i in range(200) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}"
    "{% endfor %}{{ n.a == n.b }}"
)
TOO_LARGE = {
    "a constant": "{{ 'a' * 600000000 }}",
    "a product": "{% set n = 6 %}{{ 'a' * (n * 10**9) }}",
    "%": "{{ '%0600000000d' % 1 }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "center": "{{ 'a' | center(10**9) }}",
    "~": DOUBLING,
    "replace": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "the filter format": "{{ '%*d' | format(10**9, 1) }}",
    "the method format": "{{ '{:>1000000000}'.format('a') }}",
    "a list": "{{ (range(99999) | list) * 99999 }}",
    "much in small pieces": "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_template_that_makes_gigabytes_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(TemplateLimitError, match=r"chat template evil\.jinja: .* takes more than") as error:
        ChatTemplate(TOO_LARGE[name], {}, name="evil.jinja").rendered(RECORD)
    assert error.value.exit_code == ExitCode.BAD_DATA
    assert ChatTemplate(HONEST, {}).rendered(RECORD)[0][0] == "user: hi\nassistant: yes\n"  # the next template renders


@pytest.mark.parametrize(
    "text",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        EXPONENTIAL,  # in C code, where no Python signal handler runs
    ],
)
def test_a_template_that_never_ends_is_ended_by_the_kernel(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CPU_SECONDS", 0.2)
    with pytest.raises(TemplateLimitError, match=r"evil\.jinja: .* of CPU time"):
        ChatTemplate(text, {}, name="evil.jinja").rendered(RECORD)


def test_a_template_is_compiled_within_the_limits_too() -> None:
    with pytest.raises(TemplateLimitError, match="more than 512 MiB"):
        ChatTemplate("{{ 'a' * 200000000 }}" + HONEST, {}).compile()
    with pytest.raises(TemplateRefusedError):
        ChatTemplate("{% for %}", {}).compile()


def test_a_template_gets_no_variable_that_could_be_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    process.drop_renderer()
    assert ChatTemplate(HONEST, {}).rendered(RECORD)
    assert b"AWS_SECRET_ACCESS_KEY" not in Path(f"/proc/{process.renderer_pid()}/environ").read_bytes()


def test_a_renderer_that_is_killed_from_outside_is_named_and_replaced() -> None:
    template = ChatTemplate(HONEST, {})
    template.rendered(RECORD)
    pid = process.renderer_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RendererDiedError) as error:
        template.rendered(RECORD)
    assert error.value.exit_code.retryable
    assert template.rendered(RECORD)


def test_threads_and_many_templates_get_their_own_answers() -> None:
    texts: dict[int, str] = {}

    def work(number: int) -> None:
        for round_ in range(20):
            template = Template("t", "task", f"{{{{ word }}}} {number % 4} {round_}")
            text = template.run(json.dumps({"word": f"w{number}"}))
            assert text == f"w{number} {number % 4} {round_}"
        texts[number] = text

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 8


def test_invalid_utf8_text_is_returned_unchanged() -> None:
    record = '{"messages": [{"role": "user", "content": "\\ud800\\u0000\U0001f642"}]}'
    ((text, _, _),) = ChatTemplate(HONEST, {}).rendered(record)
    assert text == "user: \ud800\0\U0001f642\n"


def test_a_renderer_ends_with_its_process() -> None:
    code = (
        "import os\nfrom holdfast.rendering import process\n"
        "process.Template('t', 'task', 'x').run('{}')\nprint(process.renderer_pid(), flush=True)\nos._exit(0)"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    for _ in range(500):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        threading.Event().wait(0.02)
    raise AssertionError("the renderer outlives its process")


def test_a_refusal_by_a_template_is_an_error_of_the_record() -> None:
    with pytest.raises(ConversationError, match="the chat template refuses it: no"):
        ChatTemplate("{{ raise_exception('no') }}", {}).rendered(RECORD)
