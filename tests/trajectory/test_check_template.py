import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trajectory.published import SOURCES, chat_template
from turnwise.trajectory import ChatTemplate
from turnwise.trajectory.check_template import check_template, main, report


def verdicts(template: ChatTemplate) -> list[str]:
    return [finding.verdict for finding in check_template(template)]


def test_a_template_that_rewrites_nothing_is_exact_throughout(template: ChatTemplate) -> None:
    assert verdicts(template) == ["exact"] * 8


STRICT = """\
{%- set past = namespace(ids=[]) %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'tool' %}
{%- if message.name != 'weather' or message.tool_call_id != past.ids[0] %}
{{- raise_exception('no call has this result') }}{% endif %}
{%- set past.ids = past.ids[1:] %}
{%- elif past.ids %}{{- raise_exception('a result is missing') }}
{%- else %}{% set past.ids = message.tool_calls | default([]) | map(attribute='id') | list %}
{%- if past.ids | unique | list != past.ids %}{{- raise_exception('one id twice') }}{% endif %}
{%- for call in message.tool_calls or [] %}
{%- if call.type != 'function' or call.function.name != tools[0].function.name %}
{{- raise_exception('no such function') }}{% endif %}
{{- '<tool_call>' + call.function.arguments | tojson + '</tool_call>' }}{% endfor %}{% endif %}
{{- message.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


def test_the_cases_are_conversations_that_fit_together(tokenizer: Any) -> None:
    """A template that compares results with calls, and calls with tools, refuses none."""
    findings = check_template(ChatTemplate(tokenizer, chat_template=STRICT))
    assert {(finding.verdict, finding.detail) for finding in findings} == {("exact", "")}


def test_what_other_templates_do_is_told() -> None:
    assert set(verdicts(chat_template("qwen2_5", "tekken"))) == {"exact"}
    assert "keeps" in verdicts(chat_template("qwen3", "bpe"))
    phi3 = check_template(chat_template("phi3", "bpe"))
    assert [finding.verdict for finding in phi3].count("forks") == 3
    assert (
        "message_dropped: the template leaves out, or moves, one of these messages: tool"
        in report(phi3)
    )
    gemma = {finding.case: finding for finding in check_template(chat_template("gemma", "bpe"))}
    assert gemma["under a system message"].verdict == "refuses"
    assert "System role not supported" in gemma["under a system message"].detail


def test_the_command_shows_a_difference(
    model_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "qwen3.jinja"
    file.write_text(SOURCES["qwen3"])
    main([model_path, "--chat-template", str(file)])
    output = capsys.readouterr().out
    assert "keeps    reasoning and an answer, then the user" in output
    assert "+I know it." in output
    assert "7 bridged; the template would rewrite earlier turns, the model sees its own" in output
    assert output.endswith("\nleft out: earlier reasoning\n")


def test_the_command_takes_the_templates_that_the_key_takes(
    model_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main([model_path, "--chat-template", "chatml"])
    output = capsys.readouterr().out
    assert "  8 bridged, and the text is the template's rendering\nleft out: tools\n" in output
    with pytest.raises(SystemExit, match=r"^check_template: --chat-template: there is no templat"):
        main([model_path, "--chat-template", "chatmi"])


def test_a_model_without_a_template_is_one_sentence(bare_path: str) -> None:
    with pytest.raises(SystemExit, match=r"^check_template: the tokenizer of .* has no chat templ"):
        main([bare_path])


def test_a_missing_model_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["check_template"])
    with pytest.raises(SystemExit, match=r"^check_template: /nowhere cannot be loaded: "):
        main(["/nowhere"])
