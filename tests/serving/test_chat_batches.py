"""A chat scheduler's one instance, and the batch that it makes of a conversation."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.simulated import SimulatedEngine
from tests.test_cli import metrics_of, turnwise, write_config
from turnwise.compat.verl.chat_scheduler import (
    ChatBackend,
    ChatCompletionScheduler,
    SchedulerConfig,
)
from turnwise.compat.verl.data_proto import DataProto
from turnwise.config import Config, parse_config
from turnwise.errors import InputError
from turnwise.rollouts import Group, Runner
from turnwise.rollouts.data import load_training
from turnwise.training.samples import make_samples
from turnwise.trajectory import Trajectory, audit, read_jsonl

QUESTION = {"role": "user", "content": "What is 12 plus 30?"}
MakeConfig = Callable[..., Config]


class TwoRounds(ChatCompletionScheduler):
    """Two rounds, and a batch of which the second round is trained; every second one is right."""

    def __init__(
        self,
        config: SchedulerConfig,
        model_path: str,
        server_addresses: list[str],
        max_cache_size: int = 10_000,
    ) -> None:
        super().__init__(config, model_path, server_addresses, max_cache_size)
        self.calls = 0
        self.loop = asyncio.get_event_loop()

    async def generate_sequences(self, batch: DataProto, **sampling_params: Any) -> Any:
        self.calls += 1
        score = float(self.calls % 2)
        kwargs = {
            "n": self.config.n,
            "max_completion_tokens": self.config.response_length,
            "temperature": self.config.temperature,
            "top_p": self.config.get("top_p"),
            **sampling_params,
        }
        messages = batch.non_tensor_batch["raw_prompt"][0].tolist()
        answers: list[Any] = []

        async def callback(completions: Any, info: dict[str, Any], exception: Any) -> None:
            assert exception is None, exception
            answers.append(completions.choices[0].message)
            if len(answers) < 2:
                info["messages"] += [answers[-1], QUESTION]
                await self.submit_chat_completions(
                    callback=callback,
                    callback_additional_info=info,
                    model=self.model_name,
                    messages=info["messages"],
                    extra_headers={"x-request-id": completions.id},
                    **kwargs,
                )

        task = asyncio.create_task(
            self.submit_chat_completions(
                callback=callback,
                callback_additional_info={"messages": messages},
                model=self.model_name,
                messages=messages,
                **kwargs,
            )
        )
        await asyncio.gather(task)
        return self.batch_of(answers, score)

    def batch_of(self, answers: list[Any], score: float) -> Any:
        first, second = answers
        start, sampled = len(first.prompt_token_ids), len(second.prompt_token_ids)
        ids = [*second.prompt_token_ids, *second.generation_token_ids]
        mask = [int(at >= sampled) for at in range(start, len(ids))]
        made = DataProto.from_tokens(
            [ids[:start]], [ids[start:]], [mask], 0, rounds=[2], note=["text"]
        )
        assert made.batch is not None
        made.batch["rm_scores"] = torch.zeros(1, len(mask))
        made.batch["rm_scores"][0, -1] = score
        return made


class FirstRoundOnly(TwoRounds):
    """Drops the second turn."""

    def batch_of(self, answers: list[Any], score: float) -> Any:
        prompt, ids = answers[0].prompt_token_ids, answers[0].generation_token_ids
        return DataProto.from_tokens([prompt], [ids], [[1] * len(ids)], 0)


class Nothing(TwoRounds):
    """Drops the conversation."""

    def batch_of(self, answers: list[Any], score: float) -> Any:
        return DataProto.from_tokens([], [], [], 0)


class Retokenised(TwoRounds):
    """Its ids are not those that were sampled; without a mask it asks for all of them."""

    def batch_of(self, answers: list[Any], score: float) -> Any:
        made = super().batch_of(answers, score)
        del made.batch["response_mask"]
        made.batch["input_ids"][:, -1] += 1
        made.batch["input_ids"][:, 3] += 1
        return made


class Wrong(TwoRounds):
    """The same, with a mask."""

    def batch_of(self, answers: list[Any], score: float) -> Any:
        made = super().batch_of(answers, score)
        made.batch["input_ids"][:, -1] += 1
        return made


class Broken(TwoRounds):
    def batch_of(self, answers: list[Any], score: float) -> Any:
        return DataProto({"input_ids": torch.zeros(3)})


class Unreadable(TwoRounds):
    def batch_of(self, answers: list[Any], score: float) -> Any:
        made = super().batch_of(answers, score)
        made.batch["attention_mask"] = made.batch["attention_mask"][:, 0]
        return made


class Unborn(ChatCompletionScheduler):
    def __init__(self, **arguments: Any) -> None:
        raise ValueError("no luck")


@asynccontextmanager
async def led_by(
    scheduler: type[ChatCompletionScheduler], make_config: MakeConfig, tokenizer: Any
) -> AsyncIterator[tuple[ChatBackend, SimulatedEngine]]:
    config = make_config(
        rollout={"chat_scheduler": f"{__name__}.{scheduler.__name__}"},
        sampling={"n": 4, "max_tokens": 12},
        engine={},
    )
    engine = SimulatedEngine(vocab_size=len(tokenizer), mean_tokens=10_000)
    backend = ChatBackend(config, engine, scheduler)
    await backend.start()
    try:
        yield backend, engine
    finally:
        await backend.stop()


async def group_of(
    scheduler: type[ChatCompletionScheduler], make_config: MakeConfig, tokenizer: Any
) -> tuple[Config, Group]:
    async with led_by(scheduler, make_config, tokenizer) as (backend, engine):
        runner = Runner(backend.config, tokenizer)
        runner.loops["chat_scheduler"].chats = backend
        problem = load_training(backend.config)[0]
        sampling = backend.config.sampling
        return backend.config, await runner.run_group(engine, problem, sampling, "group")


async def test_the_schedulers_own_batch_is_what_is_trained(
    make_config: MakeConfig, tokenizer: Any
) -> None:
    """Its mask, its scores as the reward, and its columns of numbers as metrics."""
    config, group = await group_of(TwoRounds, make_config, tokenizer)
    assert group.dropped == {}
    assert sorted(t.reward or 0.0 for t in group.trajectories) == [0.0, 0.0, 1.0, 1.0]
    for trajectory in group.trajectories:
        assert len(trajectory.turns) == 2
        (sample,) = trajectory.samples()
        first, second = (len(turn.completion_token_ids) for turn in trajectory.turns)
        assert sum(sample.response_mask) == second
        assert {*sample.turns} == {-1, 1}
        assert trajectory.metrics == {"rounds": 2.0}
        report = audit(trajectory)
        assert report.first_violation is None
        assert report.masked == {"not_chosen": first}
        assert Trajectory.from_json(trajectory.to_json()) == trajectory
    batch = make_samples([group], config, version=0)
    assert batch.report.first_violation is None
    assert batch.report.masked["not_chosen"] == batch.report.tokens_sampled / 2
    assert len(batch.samples) == 4
    assert sum(sample.trained for sample in batch.samples) == batch.report.tokens_exact
    assert batch.report.tokens_exact == batch.report.tokens_sampled / 2


async def test_turns_that_its_batch_drops_are_not_trained(
    make_config: MakeConfig, tokenizer: Any
) -> None:
    _, group = await group_of(FirstRoundOnly, make_config, tokenizer)
    assert group.dropped == {}
    for trajectory in group.trajectories:
        (sample,) = trajectory.samples()
        assert sample.leaf == 0
        assert sum(sample.response_mask) == len(trajectory.turns[0].completion_token_ids)
        assert audit(trajectory).first_violation is None
    config, group = await group_of(Nothing, make_config, tokenizer)
    assert group.dropped == {}
    assert [trajectory.samples() for trajectory in group.trajectories] == [[]] * 4
    assert make_samples([group], config, version=0).report.first_violation is None


async def test_rows_of_other_ids_are_never_trained(make_config: MakeConfig, tokenizer: Any) -> None:
    """Without a mask the sampled ids are trained instead; with one the trajectory fails."""
    _, group = await group_of(Retokenised, make_config, tokenizer)
    assert group.dropped == {}
    for trajectory in group.trajectories:
        (sample,) = trajectory.samples()
        assert sum(sample.response_mask) == trajectory.sampled_tokens
        assert trajectory.events["retokenised_rows"] == 1
        assert audit(trajectory).first_violation is None
    for scheduler, words in (
        (Wrong, "row 0 has token .* make rows of the answers' own ids"),
        (Broken, "needs the tensors input_ids, attention_mask, responses"),
        (Unreadable, "the chat scheduler's batch cannot be read"),
    ):
        _, group = await group_of(scheduler, make_config, tokenizer)
        assert group.dropped == {"inexact_rows": 4}
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(group.causes["inexact_rows"])


async def test_its_own_batches_are_what_the_manager_returns(
    make_config: MakeConfig, tokenizer: Any
) -> None:
    long = {"role": "user", "content": "What is 12 plus 30, and why is it not 43?"}
    async with led_by(TwoRounds, make_config, tokenizer) as (backend, _):
        made = await backend.generate_sequences([[QUESTION], [long]], n=2)
        await backend.set_scheduler(ChatCompletionScheduler)
        plain = await backend.generate_sequences([[QUESTION]], n=1)
    batch = made.batch
    assert batch is not None
    assert made.non_tensor_batch["index"].tolist() == [0, 0, 1, 1]
    assert made.non_tensor_batch["rounds"].tolist() == [2, 2, 2, 2]
    assert made.meta_info["dropped"] == {}
    before, after = batch["prompts"].shape[1], batch["responses"].shape[1]
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (4, before + after)
    assert batch["rm_scores"].shape == batch["response_mask"].shape == (4, after)
    assert batch["attention_mask"][0, 0] == 0  # the shorter prompt is padded on the left
    for row in range(4):
        assert torch.equal(batch["input_ids"][row, before:], batch["responses"][row])
        assert int(batch["response_mask"][row].sum()) == 12  # of the second round alone
    assert "rollout_log_probs" not in batch
    assert plain.batch is not None
    assert "rollout_log_probs" in plain.batch


async def test_one_instance_leads_every_conversation_and_keeps_state(
    make_config: MakeConfig, tokenizer: Any
) -> None:
    """It is made once, with the arguments of verl's class, on the event loop of user code."""
    async with led_by(TwoRounds, make_config, tokenizer) as (backend, engine):
        conductor: Any = backend.instance
        await backend.generate_sequences([[QUESTION]], n=3)
        runner = Runner(backend.config, tokenizer)
        runner.loops["chat_scheduler"].chats = backend
        problem, sampling = load_training(backend.config)[0], backend.config.sampling
        await runner.run_group(engine, problem, sampling, "first")
        await runner.run_group(engine, problem, sampling, "second")
        assert backend.instance is conductor
        assert conductor.calls == 3 + 4 + 4
        assert conductor.loop is not asyncio.get_running_loop()
    with pytest.raises(
        InputError, match=r"rollout\.chat_scheduler: .*:Unborn cannot be made: .*no"
    ):
        async with led_by(Unborn, make_config, tokenizer):
            pass


async def test_its_configuration_answers_to_verls_names(
    make_config: MakeConfig, tokenizer: Any
) -> None:
    async with led_by(TwoRounds, make_config, tokenizer) as (backend, _):
        config = backend.instance.config
        assert config.n == 1  # each conversation has a call of its own
        assert config.temperature == config.sampling.temperature == 1.0
        assert config.response_length is config.rollout.max_response_tokens is None
        assert config.max_model_len == config.model.max_length == 512
        assert config.get("prompt_length", 7) is None
        assert config.get("no_such_name", 7) == 7
        assert config.val_kwargs.temperature == backend.config.eval.sampling.temperature
        with pytest.raises(AttributeError, match="has no use_fire_sampling"):
            _ = config.use_fire_sampling


def test_a_scheduler_may_be_named_as_verl_names_it() -> None:
    tree = {"environment": "e:E", "model": {"path": "m"}, "data": {"path": "d"}}
    config = parse_config({**tree, "rollout": {"chat_scheduler": "package.module.Class"}})
    assert config.rollout.chat_scheduler == "package.module:Class"
    assert config.rollout.loop == "chat_scheduler"


def test_batches_are_joined_with_what_all_of_them_have() -> None:
    short = DataProto.from_tokens([[5]], [[6, 7]], [[1, 0]], 9, name=["a"], only=[1])
    long = DataProto.from_tokens([[5, 6, 7]], [[8, 9, 10]], [[1, 1, 1]], 9, name=["b"])
    assert short.batch is not None
    short.batch["extra"] = torch.ones(1, 2)
    for batch in (short.batch, long.batch):
        assert batch is not None
        batch["weight_versions"] = batch["response_mask"] + 3
    joined = DataProto.concat([short, long], pad_token_id=9)
    assert joined.batch is not None
    assert joined.batch["input_ids"].tolist() == [[9, 9, 5, 6, 7, 9], [5, 6, 7, 8, 9, 10]]
    assert joined.batch["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 0], [1] * 6]
    assert joined.batch["response_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert joined.batch["weight_versions"].tolist() == [[4, 3, -1], [4, 4, 4]]
    assert joined.non_tensor_batch["name"].tolist() == ["a", "b"]
    assert "extra" not in joined.batch
    assert "only" not in joined.non_tensor_batch
    assert len(joined) == 2
    with pytest.raises(InputError, match="needs the tensors prompts and responses"):
        DataProto.concat([joined, DataProto()])


@pytest.mark.slow  # the parts alone: the tests above
def test_a_run_trains_on_the_batches_of_a_ported_scheduler(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Callbacks, its own state, masks, scores and columns, in `turnwise train`."""
    done = turnwise(
        *("train", write_config(make_config, tmp_path), "name=ported"),
        *("rollout.loop=chat_scheduler", f"rollout.chat_scheduler={__name__}.TwoRounds"),
        *("training.steps=2", "eval.every=0"),
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "ported"
    rows = metrics_of(run)
    assert [row["weight_version"] for row in rows] == [1, 2]
    for step, row in enumerate(rows, start=1):
        assert row["dropped"] == {}
        assert row["reward_mean"] == 0.5
        assert row["env"] == {"rounds": 2.0}
        assert row["exact_percent"] == 100.0
        assert row["logprob_diff_max"] < 1e-4
        trajectories = list(read_jsonl(run / "trajectories" / f"step-000{step}.jsonl"))
        assert len(trajectories) == 16
        second = [len(t.turns[1].completion_token_ids) for t in trajectories]
        assert row["trained_tokens"] <= sum(second)
        for trajectory in trajectories:
            assert audit(trajectory).first_violation is None
            assert all({*sample.turns} <= {-1, 1} for sample in trajectory.samples())
