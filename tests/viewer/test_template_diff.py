"""The ids of a branch against those that the chat template renders from its messages."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from transformers import AutoTokenizer

from tests.conftest import ROOT
from turnwise.config import Config, ModelConfig, dump_config
from turnwise.trajectory import (
    ChatTemplate,
    Message,
    Outcome,
    Prompt,
    PromptLike,
    Trajectory,
    write_jsonl,
)
from turnwise.viewer.run_files import open_runs
from turnwise.viewer.server import make_app
from turnwise.viewer.template_diff import (
    HISTORY_CHANGED,
    TOOLS_UNKNOWN,
    Comparison,
    comparison,
    differences,
)

MODEL = ROOT / "examples" / "calculator" / "warm_started"
TOOLS = [{"type": "function", "function": {"name": "calculate", "parameters": {}}}]
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
CALLED = {"name": "calculate", "arguments": {"a": 1, "b": 2}}
few_ids = st.lists(st.integers(0, 5), max_size=40)


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(AutoTokenizer.from_pretrained(MODEL))


@pytest.fixture(scope="module")
def renderer() -> Comparison:
    return comparison(MODEL / "tokenizer.json")


def said(trajectory: Trajectory, prompt: PromptLike, ids: list[int], **more: Any) -> list[int]:
    """Add a turn; return its path."""
    trajectory.add_turn(prompt, ids, [-0.5] * len(ids), [0] * len(ids), "stop", **more)
    return Prompt.joined(prompt, ids).tolist()


def played(template: ChatTemplate, call: list[int], tools: Any = TOOLS) -> Trajectory:
    """A question, a call that was sampled as these ids, its result and an answer."""
    trajectory = Trajectory("rows:1", status="completed", outcome=Outcome(1.0))
    calls = [{"type": "function", "function": CALLED}]
    trajectory.messages = [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "The answer is 3."},
    ]
    prompt = template.render(trajectory.messages[:1], tools=tools)
    path = said(trajectory, prompt, call)
    between = "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
    path += template.encode(f"{between}<|im_start|>assistant\n")
    said(trajectory, path, template.encode("The answer is 3.<|im_end|>"))
    return trajectory


@given(few_ids, few_ids)
def test_between_two_differences_the_ids_are_equal(ids: list[int], other: list[int]) -> None:
    at = other_at = 0
    for start, end, other_start, other_end in differences(ids, other):
        assert ids[at:start] == other[other_at:other_start]
        assert end > start or other_end > other_start
        at, other_at = end, other_end
    assert ids[at:] == other[other_at:]


def test_differences_of_long_lists_are_small_and_found_at_once() -> None:
    ids = random.Random(0).choices(range(5000), k=40_000)
    other = [*ids[:1000], *ids[9000:20_000], 1, 1, *ids[20_001:]]
    assert differences(ids, other) == [
        (1000, 9000, 1000, 1000),
        (20_000, 20_001, 12_000, 12_002),
    ]
    assert len(differences([1, 2] * 20_000, [2, 1, 3] * 12_000)) == 1


@pytest.mark.parametrize(("tools", "note"), [(TOOLS, TOOLS_UNKNOWN), (None, "")])
def test_what_the_template_renders_again_is_identical(
    template: ChatTemplate, renderer: Comparison, tools: Any, note: str
) -> None:
    trajectory = played(template, template.encode(f"{CALL}<|im_end|>"), tools)
    compared = renderer(trajectory, 1)
    assert (compared["identical"], compared["pieces"], compared["note"]) == (True, [], note)
    assert compared["sampled"] == compared["rendered"] == trajectory.turns[1].path_length
    assert template.decode_all(compared["closing"]) == "\n"


def test_a_call_that_was_written_otherwise_differs(
    template: ChatTemplate, renderer: Comparison
) -> None:
    sampled = template.encode(f"{CALL.replace('1,', '1 ,')}<|im_end|>")
    trajectory = played(template, sampled)
    compared = renderer(trajectory, 1)
    assert not compared["identical"]
    path = trajectory.prompt_token_ids(1)
    first = len(trajectory.prompt_token_ids(0))
    start, end, rendered, same_text = compared["pieces"][0]
    assert first < start < end <= first + len(sampled)
    assert (" ," in template.decode_all(path[start:end]), same_text) == (True, False)
    assert " ," not in template.decode_all(rendered)


def test_the_same_text_in_other_tokens_differs(
    template: ChatTemplate, renderer: Comparison
) -> None:
    whole = template.encode(f"{CALL}<|im_end|>")
    at, pieces = next(
        (at, [template.encode(c) for c in text])
        for at, token in enumerate(whole)
        if len(text := template.decode_all([token])) > 2 and not text.startswith("<")
    )
    respelled = [*whole[:at], *(i for ids in pieces for i in ids), *whole[at + 1 :]]
    [[_, _, rendered, same_text]] = renderer(played(template, respelled), 1)["pieces"]
    assert (rendered, same_text) == ([whole[at]], True)


def test_branches_are_compared_each_with_its_own_messages(
    template: ChatTemplate, renderer: Comparison
) -> None:
    """A turn of a session holds only the messages since the turn that it continues."""
    trajectory = Trajectory("rows:1")
    question, more = ({"role": "user", "content": text} for text in ("Question?", "More?"))
    answer = template.encode(f"{CALL}<|im_end|>")
    calls = [{"type": "function", "function": CALLED}]
    other = [{"type": "function", "function": CALLED | {"arguments": {"a": 7, "b": 2}}}]
    path = said(trajectory, template.render([question]), answer, messages=[question])
    path += template.encode("\n<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\n")
    said(trajectory, path, template.encode("Two .<|im_end|>"), messages=[more])
    edited: list[Message] = [question, {"role": "assistant", "tool_calls": other}, more]
    prompt = template.render(edited)
    said(trajectory, prompt, answer, messages=edited, fork_reason="history_changed")
    trajectory.messages = [*edited, {"role": "assistant", "tool_calls": calls}]
    for leaf in (1, 2):
        compared = renderer(trajectory, leaf)
        assert (compared["error"], compared["identical"], compared["note"]) == (None, True, "")


def test_a_rewritten_history_is_shown_with_a_note(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, tmp_path)
    hide = "{% if not loop.last and m.role == 'user' %}(old){% endif %}"
    text = f"{{% for m in messages %}}<|im_start|>{hide}{{{{ m.content }}}}<|im_end|>{{% endfor %}}"
    (tmp_path / "chat_template.jinja").write_text(text)
    template = ChatTemplate(AutoTokenizer.from_pretrained(tmp_path))
    trajectory = Trajectory("rows:1")
    question = {"role": "user", "content": "Question?"}
    prompt = Prompt.joined(template.encode("Tools."), template.render([question]))
    said(trajectory, prompt, template.encode("Answer."))
    trajectory.messages = [question, {"role": "assistant", "content": "Answer."}]
    compared = comparison(tmp_path / "tokenizer.json")(trajectory, 0)
    assert (compared["identical"], compared["note"]) == (False, HISTORY_CHANGED)
    assert template.decode_all(compared["pieces"][0][2]) != "Tools."


def test_the_runs_own_template_is_the_one_that_renders(template: ChatTemplate) -> None:
    text = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    text += "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    own = ChatTemplate(template.tokenizer, chat_template=text)
    trajectory = Trajectory("rows:1")
    question = {"role": "user", "content": "Question?"}
    said(trajectory, own.render([question]), own.encode("Answer.<|im_end|>"))
    trajectory.messages = [question, {"role": "assistant", "content": "Answer."}]
    for model, identical in (({"chat_template": text}, True), ({}, False)):
        compared = comparison(MODEL / "tokenizer.json", model)(trajectory, 0)
        assert (compared["error"], compared["identical"]) == (None, identical)


def test_what_cannot_be_rendered_says_why(tmp_path: Path, template: ChatTemplate) -> None:
    trajectory = played(template, template.encode(f"{CALL}<|im_end|>"))
    missing = comparison(None)(trajectory, 1)["error"]
    assert "tokenizer was not found" in missing
    (tmp_path / "tokenizer.json").write_text("{}")
    broken = comparison(tmp_path / "tokenizer.json")
    assert [broken(trajectory, 1)["error"] for _ in range(2)][1].startswith(
        f"the tokenizer in {tmp_path} cannot be loaded: "
    )
    trajectory.messages = trajectory.messages[:1]
    error = comparison(MODEL / "tokenizer.json")(trajectory, 1)["error"]
    assert error == "the messages of this branch are not recorded one by one"
    with pytest.raises(IndexError):
        broken(trajectory, 2)


def test_the_viewer_serves_the_comparison_of_a_branch(
    tmp_path: Path, template: ChatTemplate
) -> None:
    run = tmp_path / "runs" / "demo"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(dump_config(Config(model=ModelConfig(path=str(MODEL)))))
    call = template.encode(f"{CALL.replace('1,', '1 ,')}<|im_end|>")
    write_jsonl(run / "trajectories" / "step-0001.jsonl", [played(template, call)])
    client = TestClient(make_app(open_runs([run]), "x", 8123), base_url="http://127.0.0.1:8123")
    assert client.get("/?token=x").status_code == 200
    path = "/api/runs/demo/files/step-0001/0/template"
    answer = client.get(f"{path}/1").json()
    ids = {token for _, _, rendered, _ in answer["pieces"] for token in rendered}
    assert ids
    assert {*map(int, answer["texts"])} == {*ids, *answer["closing"]}
    assert client.get(f"{path}/2").status_code == 404
