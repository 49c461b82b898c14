"""Rows of supervised training as samples, and their loss."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.calculator.conversations import IGNORED, encode, solved_conversation
from examples.calculator.problems import demonstrations
from examples.calculator.tool import TOOL_SCHEMA
from tests.training.test_rank import train
from turnwise.chat.template import load_template
from turnwise.config import Config
from turnwise.config.supervised import supervised_config
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollouts import Problem
from turnwise.training.rank import TrainerRank
from turnwise.training.supervised import RowReader, supervised_samples
from turnwise.trajectory import ChatTemplate, Outcome, Trajectory
from turnwise.trajectory.training_trace import to_training_trace
from turnwise.weights import shm


@pytest.fixture
def config(make_config: Callable[..., Config]) -> Config:
    return supervised_config(make_config(algorithm={"loss": "gspo"}, sampling={"temperature": 0.5}))


@pytest.fixture
def reader(config: Config, tokenizer: Any) -> RowReader:
    return RowReader(
        config.model.max_length,
        load_template(config.model, config.sampling, config.engine, tokenizer),
    )


def solutions(count: int) -> list[dict[str, Any]]:
    taken = (row for row, _ in zip(demonstrations(0), range(count), strict=False))
    return [{"messages": solved_conversation(row), "tools": [TOOL_SCHEMA]} for row in taken]


def read(reader: RowReader, row: dict[str, Any]) -> Trajectory:
    return reader.read(Problem("rows:1", row))


def refusal(reader: RowReader, row: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(TrajectoryError) as refused:
        read(reader, row)
    return refused.value.reason, str(refused.value)


def test_only_what_rows_need_is_kept_of_a_configuration(
    config: Config, make_config: Callable[..., Config]
) -> None:
    assert config.algorithm.loss.name == "cross_entropy"
    assert config.sampling.temperature == 1.0
    ahead = {"sampling": {"stop_token_ids": [7]}, "eval": {"background": True, "target": 0.5}}
    made = supervised_config(make_config(**ahead))
    assert made.sampling.stop_token_ids == [7], "turns end there"
    assert (made.sampling.n, made.eval.background, made.eval.target) == (1, False, None)
    assert made.training.max_staleness == 1, "rows are read while the trainer trains"
    repeated = made.model_copy(update={"deterministic": True})
    assert supervised_config(repeated).training.max_staleness == 0
    assert supervised_config(made) == made, "as when a run is resumed"


@pytest.mark.parametrize(("rank", "rates"), [(0, (1e-6, 1e-5)), (8, (1e-5, 1e-4))])
def test_the_learning_rate_follows_the_method_unless_it_is_set(
    make_config: Callable[..., Config], rank: int, rates: tuple[float, float]
) -> None:
    model = {"path": "m", "max_length": 8, "lora": {"rank": rank}}
    config = make_config(model=model, training={"learning_rate": None})
    supervised = supervised_config(config)
    assert (config.learning_rate, supervised.learning_rate) == pytest.approx(rates)
    assert supervised_config(supervised) == supervised, "as when a run is resumed"
    chosen = make_config(model=model, training={"learning_rate": 0.5})
    assert chosen.learning_rate == supervised_config(chosen).learning_rate == 0.5


def test_masks_are_those_of_a_search_in_the_calculators_template(
    reader: RowReader, tokenizer: Any
) -> None:
    rows = [row for row, _ in zip(demonstrations(0), range(20), strict=False)]
    for row, example in zip(rows, encode(tokenizer, rows), strict=True):
        made = {"messages": solved_conversation(row), "tools": [TOOL_SCHEMA]}
        (sample,) = supervised_samples([read(reader, made)], 0).samples
        labels = [i if m else IGNORED for i, m in zip(*_both(sample), strict=True)]
        assert labels == example.labels[: sample.length]
        assert set(example.labels[sample.length :]) <= {IGNORED}


def _both(sample: Any) -> tuple[list[int], list[bool]]:
    return sample.token_ids_T.tolist(), sample.response_mask_T.tolist()


def test_every_form_of_a_row_gives_the_same_tokens(reader: RowReader) -> None:
    (row,) = solutions(1)
    whole = read(reader, row)
    (branch,) = whole.samples()
    stored = json.loads(replace(whole, outcome=Outcome(1.0)).to_json())
    forms = [
        stored,
        to_training_trace(whole),
        {**row, "tools": json.dumps([TOOL_SCHEMA])},
    ]
    for form in forms:
        (other,) = read(reader, form).samples()
        assert (other.token_ids, other.response_mask) == (branch.token_ids, branch.response_mask)


def test_parts_of_a_text_are_joined_as_in_a_chat(reader: RowReader, tokenizer: Any) -> None:
    template = ChatTemplate(tokenizer)
    parts = [{"type": "text", "text": part} for part in ("What is", "2 plus 2?")]
    answer = {"role": "assistant", "content": "4"}
    (made,) = read(reader, {"messages": [{"role": "user", "content": parts}, answer]}).turns
    joined = {"role": "user", "content": template.between_parts.join(p["text"] for p in parts)}
    assert template.between_parts == "\n"
    assert made.added == template.render([joined])


def test_rows_that_cannot_be_exact_are_refused_with_a_reason(
    reader: RowReader, make_config: Callable[..., Config], tokenizer: Any
) -> None:
    (row,) = solutions(1)
    stored = json.loads(read(reader, row).to_json())
    stored["turns"][0]["completion_token_ids"][0] += 1
    assert refusal(reader, stored)[0] == "not_exact"
    assert refusal(reader, {"turns": [{"node_id": 1}]})[0] == "malformed"
    assert refusal(reader, {"problem_id": "a", "turns": 3})[0] == "malformed"
    known = Trajectory("a")
    known.add_turn([1], [10**6], [-1.0], [0], "stop")
    assert refusal(reader, json.loads(known.to_json())) == (
        "unknown_token",
        f"token 1000000 is outside of this tokenizer's {len(tokenizer):,}",
    )
    assert refusal(reader, json.loads(Trajectory("a").to_json()))[0] == "nothing_to_train"
    reason, why = refusal(reader, {"question": "2 + 2?", "answer": "4"})
    assert reason == "unknown_form"
    assert "this one has question, answer" in why
    short = supervised_config(make_config(model={"path": "m", "max_length": 8}))
    assert refusal(RowReader(short.model.max_length, ChatTemplate(tokenizer)), row)[0] == "too_long"


def test_a_conversation_needs_a_template_but_stored_ids_do_not(
    config: Config, reader: RowReader, bare: Any
) -> None:
    without = RowReader(config.model.max_length, ChatTemplate(bare))
    (row,) = solutions(1)
    with pytest.raises(InputError, match="has no chat template"):
        read(without, row)
    assert read(without, json.loads(read(reader, row).to_json())).turns


def test_the_loss_is_transformers_mean_cross_entropy(
    make_config: Callable[..., Config], reader: RowReader, build: Path
) -> None:
    trajectories = [read(reader, row) for row in solutions(6)]
    batch = supervised_samples(trajectories, 0)
    assert batch.report.violations == 0
    assert batch.report.tokens_trained == sum(sample.trained for sample in batch.samples)
    model: Any = AutoModelForCausalLM.from_pretrained(build / "model", dtype=torch.float32).eval()
    total, tokens = 0.0, 0
    for sample in batch.samples:
        ids, mask = _both(sample)
        labels = [i if m else IGNORED for i, m in zip(ids, mask, strict=True)]
        with torch.no_grad():
            loss = model(torch.tensor([ids]), labels=torch.tensor([labels])).loss
        total += float(loss) * sample.trained
        tokens += sample.trained
    for packing in ("padded", "packed", "shared"):
        training = {"learning_rate": 1e-4, "threads": 1, "packing": packing}
        policy = TrainerRank(supervised_config(make_config(training=training)))
        metrics = train(policy, batch.samples)
        assert metrics["loss"] == pytest.approx(total / tokens, abs=1e-5)
        assert metrics["trained_tokens"] == tokens
        assert metrics["staleness"] == {"0": tokens}
        assert train(policy, batch.samples)["loss"] < metrics["loss"]


def test_nothing_is_held_for_engines_that_are_not_there(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two copies of the weights in shared memory, which is small in a container."""

    def full(nbytes: int) -> int:
        raise InputError("/dev/shm is full")

    monkeypatch.setattr(shm, "open_nameless", full)
    with pytest.raises(InputError, match="full"):
        TrainerRank(make_config(output_dir=str(tmp_path)))
    TrainerRank(supervised_config(make_config(output_dir=str(tmp_path))))
    assert not [*tmp_path.glob("*/weights")]


def test_conversations_of_sharegpt_are_rows(reader: RowReader) -> None:
    (row,) = solutions(1)
    by_role = {"user": "human", "assistant": "gpt", "tool": "observation", "system": "system"}
    turns: list[dict[str, Any]] = []
    for message in row["messages"]:
        turn = {"from": by_role[message["role"]], "value": message["content"]}
        if calls := message.get("tool_calls"):
            functions = [call["function"] for call in calls]
            said = [f | {"arguments": _object(f["arguments"])} for f in functions]
            turn = {"from": "function_call", "value": json.dumps(said)}
        turns.append(turn)
    tools = json.dumps([TOOL_SCHEMA["function"]])
    shared = {"conversations": turns, "tools": tools, "system": ""}
    expected = read(reader, row)
    assert [t.completion_token_ids for t in read(reader, shared).turns] == [
        turn.completion_token_ids for turn in expected.turns
    ]
    same = {"conversations": row["messages"], "tools": row["tools"]}
    assert read(reader, same) == expected
    masked = [*turns[:-1], {**turns[-1], "train": False}]
    assert len(read(reader, {**shared, "conversations": masked}).turns) < len(expected.turns)
    spoken = [{"from": "narrator", "value": "Once."}, *turns]
    assert refusal(reader, {"conversations": spoken}) == (
        "malformed",
        "conversations: turn 1 is from 'narrator', and none of human, user, gpt, assistant, "
        "chatgpt, model, function_call, observation, tool, function_response, system",
    )
    called = [turns[0], {"from": "function_call", "value": "calculate(1)"}]
    assert refusal(reader, {"conversations": called})[0] == "malformed"


def _object(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments
