"""Training loops of programs: `turnwise.open`."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import turnwise
from tests.test_cli import Lottery, metrics_of
from turnwise.config import Config, dump_config
from turnwise.errors import InputError
from turnwise.run.program import Samples
from turnwise.training.algorithms import Tokens
from turnwise.training.sample import Sample
from turnwise.trajectory import read_jsonl

KEYS: dict[str, Any] = {
    "sampling": {"n": 4, "max_tokens": 12},
    "rollout.prompts_per_step": 2,
    "training": {"learning_rate": 1e-3, "steps": 8, "lr_schedule": "linear"},
    "eval.sampling": {"n": 2, "temperature": 1.0},
    "serving.workers": 1,
    "progress": False,
}
ROWS = [{"question": f"What is {a} plus {a + 1}?"} for a in range(6)]


class Alternating(Lottery):
    """Rewards that differ within each group."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.problem = row["question"]

    def reward(self, trajectory: Any) -> float:
        return float(trajectory.sample_index % 2)


def reinforce(tokens: Tokens) -> torch.Tensor:
    return -tokens.advantages_N * tokens.logprobs_N


def weighted(samples: list[Sample], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, Any]:
    """The loss of `reinforce` with the reduction `sum`, in this process."""
    parts = [
        -(torch.from_numpy(s.advantages_T[s.response_mask_T]) * own).sum()
        for s, own in zip(samples, logprobs, strict=True)
    ]
    return torch.stack(parts).sum(), {"sequences": len(parts)}


@pytest.fixture(scope="module")
def opening(
    ray_started: None, make_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., turnwise.Run]:
    folder = tmp_path_factory.mktemp("own")
    path = folder / "config.yaml"
    path.write_text(dump_config(make_config(output_dir=str(folder))))

    def opened(name: str, **more: Any) -> turnwise.Run:
        return turnwise.open(path, Alternating, ROWS, name=name, eval_data=ROWS[:2], **KEYS | more)

    return opened


@pytest.fixture(scope="module")
def run(opening: Callable[..., turnwise.Run]) -> Iterator[turnwise.Run]:
    with opening("shared") as run:
        yield run


def test_a_loop_of_a_program_is_a_run_that_goes_on(opening: Callable[..., turnwise.Run]) -> None:
    with opening("whole") as run:
        first = run.evaluate()
        assert run.sync() == 0
        for step in (1, 2):
            groups = run.rollout(run.problems(2))
            batch = run.samples(groups)
            metrics = run.forward_backward(batch, loss="ppo_clip")
            assert metrics["trained_tokens"] == sum(sample.trained for sample in batch.samples)
            taken = run.optim_step()
            assert (taken["step"], run.sync(), run.version) == (step, step, step)
            assert taken["grad_norm"] > 0
        assert taken["learning_rate"] == pytest.approx(1e-3 * 7 / 8)
        assert run.evaluate().accuracy == first.accuracy == 0.5
        place = run.save(state={"note": "kept"})
        after = run.problems(3)
        exactness = run.exactness
    rows = metrics_of(run_folder := place.parents[1])
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["weight_version"] for row in rows[1:]] == [1, 2]
    assert rows[2]["accuracy_heldout"] == 0.5
    assert rows[1]["exact_percent"] == 100
    assert rows[1]["reward_mean"] == 0.5
    for step in (1, 2):
        written = list(read_jsonl(run_folder / "trajectories" / f"step-000{step}.jsonl"))
        assert len(written) == 8
        assert (run_folder / "training" / f"step-000{step}.safetensors").exists()
    assert json.loads((run_folder / "exactness.json").read_text()) == exactness.to_dict()
    with pytest.raises(InputError, match="the run does not run: use it inside its with block"):
        run.sync()

    with turnwise.open(
        environment=Alternating, data=ROWS, eval_data=ROWS[:2], resume=run_folder, progress=False
    ) as again:
        assert (again.step, again.version, again.state) == (2, 2, {"note": "kept"})
        assert again.exactness == exactness
        assert [each.id for each in again.problems(3)] == [each.id for each in after]
        groups = again.rollout(again.problems(2))
        assert {v for g in groups for t in g.trajectories for v in t.turns[0].weight_versions} == {
            2
        }
        again.forward_backward(again.samples(groups))
        assert again.optim_step()["step"] == 3
    assert [row["step"] for row in metrics_of(run_folder)] == [0, 1, 2, 3]


def test_gradients_add_up_and_may_be_dropped(run: turnwise.Run) -> None:
    batch = run.samples(run.rollout(run.problems(2)))
    before = run.version
    run.forward_backward(batch)
    run.drop()
    with pytest.raises(InputError, match="no gradient was added since the last step"):
        run.optim_step()
    norms = []
    for count in (1, 3):
        for _ in range(count):
            run.forward_backward(batch, loss=reinforce)
        norms.append(run.optim_step(0.0)["grad_norm"])  # by which the weights stay as they are
    assert norms[1] == pytest.approx(3 * norms[0], rel=1e-4)
    assert run.version == before + 2


def test_a_step_with_nothing_to_train_skips_the_optimizer(run: turnwise.Run) -> None:
    groups = run.rollout(run.problems(2))
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.set_outcome(reward=1.0, parts={}, turns=[])
    before = run.sync()
    batch = run.samples(groups)
    assert batch.samples == []
    assert run.forward_backward(batch) == {}
    taken = run.optim_step()
    assert (taken["reward_mean"], taken["grad_norm"]) == (1.0, None)
    assert run.sync() == run.version == before
    assert metrics_of(run.folder)[-1]["trained_tokens"] == 0


def test_a_loss_may_be_a_name_a_path_a_class_or_a_function(
    run: turnwise.Run,
) -> None:
    run.sync()
    batch = run.samples(run.rollout(run.problems(2)))
    given: list[Any] = [
        "cross_entropy",
        {"name": "cross_entropy"},
        reinforce,
        "tests.test_own_loop:reinforce",
        "turnwise.training.algorithms.losses:CrossEntropyLoss",
    ]
    norms = []
    for loss in given:
        metrics = run.forward_backward(batch.samples, loss=loss, reduction="sum")
        run.drop()
        norms.append(metrics["loss"])
    assert norms == pytest.approx([norms[0]] * len(given), rel=1e-6)
    run.forward_backward(batch, loss=reinforce, reduction="sum")
    plain = run.optim_step(0.0)
    run.sync()
    custom = run.forward_backward_custom(batch, weighted)
    assert custom["sequences"] == len(batch.samples)
    assert custom["loss"] == pytest.approx(plain["loss"], rel=1e-4, abs=1e-4)
    assert run.optim_step(0.0)["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)


def test_what_cannot_be_used_is_one_sentence(
    run: turnwise.Run, opening: Callable[..., turnwise.Run]
) -> None:
    run.sync()
    batch = run.samples(run.rollout(run.problems(1)))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"loss": "ppo"}, "but one of ppo_clip, gspo"),
        ({"loss": {"name": "ppo_clip", "clip": 1}}, "clip"),
        ({"loss": "dpo"}, "there is no reference model"),
        ({"loss": 3}, "neither the name of a loss nor a function"),
        ({"reduction": "mean"}, "reduction"),
        ({"loss": lambda tokens: tokens.logprobs_N.sum()}, "a tensor of .* losses, one for each"),
    ]
    for options, why in wrong:
        with pytest.raises(InputError, match=why):
            run.forward_backward(batch, **options)
    run.forward_backward(batch)
    run.optim_step()
    with pytest.raises(InputError, match="this loss has no importance ratio"):
        run.forward_backward(batch, loss="cross_entropy")
    foreign = Samples(batch.samples)
    with pytest.raises(InputError, match="these samples are of another run"):
        run.forward_backward(foreign)
    with pytest.raises(InputError, match="sampling_params has no heat"):
        run.sample("Hello", heat=1)
    with pytest.raises(InputError, match="sampling_params: temperature: "):
        run.sample("Hello", temperature="hot")


def test_prompts_are_sampled_and_scored(run: turnwise.Run) -> None:
    run.sync()
    answers = run.sample("What is 1 plus 2?", n=3, max_tokens=5)
    assert [len(each.token_ids) <= 5 for each in answers] == [True] * 3
    ids = [5, 6, 7, 8]
    (answer,) = run.sample(ids, temperature=1.0, max_tokens=4)
    (scored,) = run.logprobs([[*ids, *answer.token_ids]])
    assert len(scored) == 4 + len(answer.token_ids)
    assert scored[4:] == pytest.approx(answer.logprobs, abs=1e-3)
    batch = run.samples(run.rollout(run.problems(1)))
    for sample, values in zip(batch.samples, run.logprobs(batch), strict=True):
        mask = sample.response_mask_T
        assert torch.tensor(values)[mask].tolist() == pytest.approx(
            sample.logprobs_T[mask].tolist(), abs=1e-3
        )


async def test_rollouts_run_ahead_in_an_async_block(opening: Callable[..., turnwise.Run]) -> None:
    async with opening("ahead", **{"training.max_staleness": 1}) as run:
        ahead = asyncio.create_task(run.rollout(run.problems(2)))
        for _ in range(3):
            groups = await ahead
            ahead = asyncio.create_task(run.rollout(run.problems(2)))
            await asyncio.sleep(0)
            await run.forward_backward(await run.samples(groups))
            await run.optim_step()
            await run.sync()
        await ahead
        folder = run.folder
    rows = metrics_of(folder)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["stale_tokens"] == 0 for row in rows)
    with pytest.raises(InputError, match="the run is closed"):
        await run.sync()


def test_turnwise_train_does_not_go_on_with_a_programs_run(
    opening: Callable[..., turnwise.Run], tmp_path: Path
) -> None:
    with opening("short") as run:
        run.forward_backward(run.samples(run.rollout(run.problems(1))))
        run.optim_step()
        folder = run.save().parents[1]
    with pytest.raises(InputError, match=r"a program's run: turnwise.open\(resume"):
        turnwise.train(environment=Alternating, data=ROWS, eval_data=ROWS[:2], resume=folder)
