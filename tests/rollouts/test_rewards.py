"""Parts of the reward and their sum; reward models in their own actors."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import RayError
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM
from transformers import LlamaForSequenceClassification as Classifier

from turnwise.config import Config, RewardConfig, RolloutConfig
from turnwise.errors import InputError, TrajectoryError, TurnwiseError
from turnwise.rollouts.episode import Episode
from turnwise.rollouts.problems import Problem
from turnwise.rollouts.reward_model import (
    RemoteRewardModel,
    RewardModel,
    batches,
)
from turnwise.rollouts.rewards import RewardManager
from turnwise.run.display import SILENT
from turnwise.run.runtime import start_reward_models
from turnwise.trajectory import Outcome, Trajectory

HERE = "tests.rollouts.test_rewards"


class Desk:
    """An environment whose reward is what it was made with."""

    problem = ({"role": "user", "content": "Go."},)
    tools = ()

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row

    def reward(self, trajectory: Trajectory) -> float:
        value: float = self.row["reward"]
        return value


def playing(row: dict[str, Any]) -> Episode:
    """Return an episode whose environment is built."""
    episode = Episode(Desk, Problem("rows:1", row), RolloutConfig())
    episode.environment = Desk(row)
    return episode


def turns(trajectory: Trajectory, row: dict[str, Any]) -> float:
    return float(len(trajectory.messages))


def in_thread(trajectory: Trajectory, row: dict[str, Any]) -> bool:
    return threading.current_thread() is not threading.main_thread()


async def patient(trajectory: Trajectory, row: dict[str, Any]) -> float:
    await asyncio.sleep(0.01)
    return float(row["patience"])


def late(trajectory: Trajectory, row: dict[str, Any]) -> float:
    raise TimeoutError("the judge's server is away")


def given(trajectory: Trajectory, row: dict[str, Any]) -> Any:
    return row["given"]


async def judge(parts: list[dict[str, Any]], row: dict[str, Any], judged: Any = None) -> Trajectory:
    rewards = RewardManager([RewardConfig(**part) for part in parts])
    trajectory = Trajectory("rows:1", outcome=Outcome(judged))
    trajectory.messages = [{"role": "user", "content": "Go."}]
    await rewards.reward(playing(row), trajectory, row)
    return trajectory


def hangs(*_: object, **__: object) -> Any:
    threading.Event().wait(20)


async def hangs_async(*_: object, **__: object) -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize("how", ["hangs", "hangs_async"])
@pytest.mark.parametrize("kind", ["function", "group_function", "trl"])
async def test_a_reward_that_hangs_is_named_within_its_deadline(kind: str, how: str) -> None:
    part = RewardConfig.model_validate({kind: f"{HERE}:{how}"})
    rewards = RewardManager([part], rollout=RolloutConfig(stall_timeout=0.2))
    trajectory, row = Trajectory("rows:1", outcome=Outcome(1.0)), {"reward": 1.0}
    trajectory.messages = [{"role": "user", "content": "Go."}]
    episode = playing(row)
    episode.problem = trajectory.messages
    late = rf"{how} did not answer within 0\.2 s \(rollout\.stall_timeout\)"
    judging = (
        rewards.reward(episode, trajectory, row)
        if kind == "function"
        else rewards.reward_group([trajectory], row, {0: episode}, Counter())
    )
    with pytest.raises(TrajectoryError, match=late) as raised:
        await judging
    assert raised.value.reason == "reward_error"


async def test_without_parts_the_reward_is_the_environments_own() -> None:
    trajectory = await judge([], {"reward": 0.25})
    assert (trajectory.reward, trajectory.reward_parts) == (0.25, {"environment": 0.25})


async def test_parts_are_weighted_and_added_and_kept_as_they_were() -> None:
    """By `rollout.rewards`."""
    parts = [
        {"weight": 0.5},
        {"function": f"{HERE}:turns", "weight": -2.0},
        {"function": f"{HERE}:patient"},
        {"function": f"{HERE}:in_thread", "weight": 100},
    ]
    trajectory = await judge(parts, {"reward": 1, "patience": 7})
    assert trajectory.reward == 0.5 - 2.0 + 7 + 100
    assert trajectory.reward_parts == {
        "environment": 1.0,
        f"{HERE}:turns": 1.0,
        f"{HERE}:patient": 7.0,
        f"{HERE}:in_thread": 1.0,
    }
    assert Trajectory.from_json(trajectory.to_json()) == trajectory


async def test_an_agents_reward_replaces_only_the_environments_part() -> None:
    parts = [{}, {"function": f"{HERE}:turns"}]
    assert (await judge(parts, {"reward": 0.0}, judged=0.5)).reward == 1.5


@pytest.mark.parametrize(
    ("value", "number"),
    [(True, 1.0), (False, 0.0), (np.float32(0.5), 0.5), (torch.tensor([2.0]), 2.0), (3, 3.0)],
)
async def test_a_number_of_any_kind_counts(value: Any, number: float) -> None:
    assert (await judge([{"function": f"{HERE}:given"}], {"given": value})).reward == number


@pytest.mark.parametrize(
    "value", [None, float("nan"), float("inf"), "0.5", torch.ones(2), {}, 10**400], ids=repr
)
async def test_what_is_no_finite_number_drops_the_trajectory(value: Any) -> None:
    with pytest.raises(TrajectoryError, match=f"^the reward function {HERE}:given gave .* not a "):
        await judge([{"function": f"{HERE}:given"}], {"given": value})
    with pytest.raises(TrajectoryError, match=r"^the environment gave .* finite number") as error:
        await judge([], {"reward": value})
    assert error.value.reason == "reward_error"


@pytest.mark.parametrize("value", [1e200, -2e6, 10**7, np.float64(1e7)], ids=repr)
async def test_a_reward_beyond_the_limit_drops_the_trajectory(value: Any) -> None:
    with pytest.raises(
        TrajectoryError, match=r"^the environment gave .* beyond .* ±1e\+06"
    ) as error:
        await judge([], {"reward": value})
    assert error.value.reason == "reward_error"
    with pytest.raises(TrajectoryError, match=r"^the environment gave .* beyond the limit"):
        await judge([], {}, judged=value)
    with pytest.raises(TrajectoryError, match=r"^the weighted sum of rewards is beyond the limit"):
        await judge([{"weight": 1e5}], {"reward": 100})
    assert (await judge([], {"reward": -1e6})).reward == -1e6


async def test_a_part_that_raises_is_named_with_what_it_said() -> None:
    with pytest.raises(TrajectoryError, match="environment gave no reward: KeyError") as error:
        await judge([{}, {"function": f"{HERE}:patient"}], {"patience": 1})
    assert error.value.reason == "reward_error"
    with pytest.raises(TrajectoryError, match=f"{HERE}:late gave no reward: TimeoutError: the j"):
        await judge([{"function": f"{HERE}:late"}], {})


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{"function": f"{HERE}:gone"}], r"rollout\.rewards\.function: .* has no gone"),
        ([{}, {"weight": 2}], "names environment twice"),
        ([{"model": "m"}, {"model": "m"}], "names m twice"),
    ],
)
def test_parts_that_cannot_be_are_refused(parts: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RewardManager([RewardConfig(**part) for part in parts])


# Reward models.


@pytest.fixture(scope="module")
def make_model(
    tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[str, Any]]:
    """Save a tiny model; returns its folder and it."""

    def make(kind: Any = Classifier, template: bool = True, seed: int = 0, **more: Any) -> Any:
        torch.manual_seed(seed)
        options = {"num_labels": 1, "max_position_embeddings": 128, **more}
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            pad_token_id=tokenizer.pad_token_id,
            **options,
        )
        folder = str(tmp_path_factory.mktemp("reward"))
        model = kind(config).eval()
        model.save_pretrained(folder)
        own = type(tokenizer).from_pretrained(tokenizer.name_or_path)
        if not template:
            own.chat_template = None
        own.save_pretrained(folder)
        return folder, model

    return make


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Go."}, {"role": "assistant", "content": text}]


def alone(folder: str, token_ids: list[int]) -> float:
    """The model's own score of one sequence, without us."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        return float(model(input_ids=torch.tensor([token_ids])).logits[0, 0])


TEXTS = [" ".join(["1 + 2"] * count) for count in (1, 4, 2, 7, 3)]


@pytest.mark.parametrize("batch_tokens", [0, 64, 4096])
async def test_scores_are_the_models_own_however_calls_are_batched(
    make_model: Callable[..., Any], tokenizer: Any, batch_tokens: int
) -> None:
    folder, _ = make_model()
    model = RewardModel()
    model.load(folder, batch_tokens=batch_tokens, gpu=False)
    scores = await asyncio.gather(*(model.score(said(text)) for text in TEXTS))
    for text, score in zip(TEXTS, scores, strict=True):
        rendered = tokenizer.apply_chat_template(said(text), tokenize=False)
        ids = tokenizer.encode(rendered, add_special_tokens=False)
        assert score == pytest.approx(alone(folder, ids), abs=1e-5)
    assert len(set(scores)) == len(TEXTS)


async def test_messages_without_a_chat_template_are_read_line_by_line(
    make_model: Callable[..., Any], tokenizer: Any
) -> None:
    folder, _ = make_model(template=False)
    model = RewardModel()
    model.load(folder, batch_tokens=4096, gpu=False)
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [*said("1 + 2"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    ids = tokenizer.encode('Go.\n1 + 2\n{"name": "add", "arguments": {"a": 1}}')
    assert await model.score(messages) == pytest.approx(alone(folder, ids), abs=1e-5)


async def test_a_text_is_read_as_it_is_by_a_tokenizer_of_its_own(
    make_model: Callable[..., Any], bare: Any, bare_path: str
) -> None:
    folder, _ = make_model()
    model = RewardModel()
    model.load(folder, batch_tokens=4096, gpu=False, tokenizer_path=bare_path)
    ids = bare.encode("1 + 2 = 3", add_special_tokens=False)
    assert await model.score("1 + 2 = 3") == pytest.approx(alone(folder, ids), abs=1e-5)
    with_start = bare.encode("Go.\n1 + 2")  # the tokenizer has no template, and a BOS
    assert await model.score(said("1 + 2")) == pytest.approx(alone(folder, with_start), abs=1e-5)


async def test_what_the_model_cannot_read_is_said(make_model: Callable[..., Any]) -> None:
    folder, _ = make_model()
    model = RewardModel()
    model.load(folder, batch_tokens=4096, gpu=False)
    with pytest.raises(TurnwiseError, match="tokens and the model reads 128 at most"):
        await model.score(said("1 + 2 " * 100))
    with pytest.raises(TurnwiseError, match="no messages"):
        await model.score([])


@pytest.mark.parametrize("max_tokens", [0, 7, 20, 1000])
def test_batches_are_bounded_and_lose_nothing(max_tokens: int) -> None:
    sequences = [[0] * length for length in (1, 1, 2, 3, 3, 5, 8, 9, 30)]
    made = batches(sequences, max_tokens)
    assert [index for batch in made for index in batch] == list(range(len(sequences)))
    for batch in made:
        padded = len(batch) * max(len(sequences[index]) for index in batch)
        assert padded <= max_tokens or len(batch) == 1
    if max_tokens == 1000:
        assert len(made) == 1


async def kill(model: Any) -> None:
    """Kill a reward model's actor, and wait until it is gone."""
    actor = model._actor.actor
    model.kill()
    with suppress(RayError):
        async with asyncio.timeout(120):
            while await actor.__ray_ready__.remote():
                await asyncio.sleep(0.01)


async def test_a_dead_reward_model_restarts_or_drops_the_trajectory(
    ray_started: None,
    make_model: Callable[..., Any],
    make_config: Callable[..., Config],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, _ = make_model(seed=1)
    other, _ = make_model(seed=2)
    parts = [{}, {"model": folder, "weight": 2.0}, {"model": other}]
    config = make_config(rollout={"rewards": parts})
    models = await start_reward_models(config, SILENT)
    rewards = RewardManager(config.rollout.rewards)
    rewards.models = models
    trajectories = [Trajectory("rows:1", index) for index in range(len(TEXTS))]
    for trajectory, text in zip(trajectories, TEXTS, strict=True):
        trajectory.messages = said(text)
    await asyncio.gather(*(rewards.reward(playing({"reward": 1}), t, {}) for t in trajectories))
    for trajectory in trajectories:
        given = trajectory.reward_parts
        assert given[folder] != given[other]
        assert trajectory.reward == pytest.approx(1 + 2 * given[folder] + given[other])
    trajectories[0].messages = []
    with pytest.raises(TrajectoryError, match="gave no reward: the trajectory has no messages"):
        await rewards.reward(playing({"reward": 1}), trajectories[0], {})
    await kill(models[other])
    scores = await asyncio.gather(*(models[other].score(t.messages) for t in trajectories[1:]))
    expected = [t.reward_parts[other] for t in trajectories[1:]]
    assert scores == pytest.approx(expected, abs=1e-5)  # whatever was batched with what
    (line,) = (text for text in caplog.messages if "it is back after" in text)
    assert f"the process of the reward model {other} died; it is back after" in line
    models[other]._restarts = config.serving.max_restarts
    await kill(models[other])
    with pytest.raises(TrajectoryError, match=f"{other} gave no reward: the process of") as error:
        await rewards.reward(playing({"reward": 1}), trajectories[1], {})
    assert error.value.reason == "reward_error"
    models[folder].kill()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_labels": 3}, "has 3 outputs; a reward model must have one"),
        ({"kind": LlamaForCausalLM}, r"lacks weights: score\.weight"),
    ],
)
async def test_what_is_no_reward_model_is_refused(
    ray_started: None,
    make_model: Callable[..., Any],
    make_config: Callable[..., Config],
    options: dict[str, Any],
    message: str,
) -> None:
    good, (folder, _) = make_model()[0], make_model(**options)
    config = make_config(rollout={"rewards": [{"model": good}, {"model": folder}]})
    with pytest.raises(InputError, match=message):
        await start_reward_models(config, SILENT)


async def test_a_model_that_is_not_there_is_named(
    ray_started: None, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"reward model .*nowhere cannot be loaded \(there is no"):
        await RemoteRewardModel(str(tmp_path / "nowhere"), make_config()).start()
