"""Several policies in one run, each with an adapter, samples, an optimizer and metrics."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import turnwise
from tests.test_cli import metrics_of
from turnwise.config import Config, parse_config
from turnwise.config.supervised import supervised_config
from turnwise.errors import InputError, TurnwiseError
from turnwise.trajectory import Trajectory, audit, read_jsonl

SAMPLING: dict[str, Any] = {"max_tokens": 32, "stop_token_ids": [*range(400)]}
KEYS: dict[str, Any] = {
    "rollout": {"loop": "self_play", "policies": ["white", "black"], "prompts_per_step": 2},
    "model.lora.rank": 4,
    "weights.lora": "adapter",
    "sampling": SAMPLING | {"n": 4},
    "training": {"learning_rate": 0.01, "steps": 2, "updates_per_step": 2, "threads": 1},
    "eval": {"every": 2, "sampling": SAMPLING | {"n": 2, "temperature": 1.0}},
    "serving.workers": 1,
    "progress": False,
}
ROWS = [{"question": f"What is {a} plus {a + 1}?"} for a in range(6)]
FROZEN = [row | {"frozen": who} for row in ROWS[:2] for who in ("white", "black")]


class Game(turnwise.Environment):
    """White speaks, then black; who wins depends on the number of the sample."""

    def __init__(self, row: dict[str, str]) -> None:
        self.players = {"white": row["question"], "black": f"Or: {row['question']}"}
        if "frozen" in row:
            self.policies = {row["frozen"]: "base"}
        if "named" in row:
            self.policies = {"white": row["named"]}

    def step(self, message: dict[str, Any]) -> Any:
        return {"black": ""} if message["name"] == "white" else None

    def reward(self, trajectory: Trajectory) -> turnwise.Rewards:
        win = float(trajectory.sample_index % 2)
        return turnwise.Rewards(players={"white": win, "black": 1 - win})


@pytest.fixture(scope="module")
def path(make_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from turnwise.config import dump_config

    folder = tmp_path_factory.mktemp("policies")
    path = folder / "config.yaml"
    path.write_text(dump_config(make_config(output_dir=str(folder / "runs"))))
    return path


@pytest.fixture(scope="module")
def trained(ray_started: None, path: Path) -> Path:
    result = turnwise.train(
        config=path, environment=Game, data=ROWS, eval_data=FROZEN, name="two", **KEYS
    )
    return Path(result.folder)


def by_player(trajectory: Trajectory) -> dict[str, Any]:
    return dict(zip(trajectory.turn_players, trajectory.turns, strict=True))


def test_each_player_is_sampled_and_trained_by_its_own_policy(trained: Path) -> None:
    last = {"": 0}
    for step in (1, 2):
        for trajectory in read_jsonl(trained / "trajectories" / f"step-{step:04d}.jsonl"):
            assert audit(trajectory, trajectory.samples()).violations == 0
            for player, turn in by_player(trajectory).items():
                assert turn.adapter == player
                assert set(turn.weight_versions) == {4 * (step - 1)}  # two steps of each of two
    for row in metrics_of(trained)[-2:]:
        assert row["logprob_diff_max"] < 1e-4
        assert row["canary_diff_max"] < 1e-4
        assert row["exact_percent"] == 100
        assert row["weight_version"] == last[""] + 4
        last[""] = row["weight_version"]
        own = row["policies"]
        assert own.keys() == {"white", "black"}
        assert sum(each["trained_tokens"] for each in own.values()) == row["trained_tokens"]
        assert [each["reward_mean"] for each in own.values()] == [0.5, 0.5]
        assert own["white"]["grad_norm"] != own["black"]["grad_norm"]


def test_the_model_without_an_adapter_plays_where_a_game_says_so(trained: Path) -> None:
    games = list(read_jsonl(trained / "trajectories" / "eval-0002.jsonl"))
    games = [game for game in games if len(game.turns) == 2]  # an answer may be cut off
    assert games
    for trajectory in games:
        turns = by_player(trajectory)
        frozen = [player for player, turn in turns.items() if not turn.adapter]
        assert len(frozen) == 1
        assert turns[frozen[0]].untrained == "frozen_policy"
        (own,) = [branch for branch in trajectory.samples() if any(branch.response_mask)]
        assert trajectory.turns[own.leaf].adapter not in ("", frozen[0])


def test_checkpoints_have_an_adapter_of_each_and_a_run_goes_on(trained: Path) -> None:
    folder = trained / "checkpoints" / "step-0002" / "policies"
    white, black = (
        load_file(folder / name / "adapter_model.safetensors") for name in ("white", "black")
    )
    assert white.keys() == black.keys()
    assert all(not torch.equal(white[name], black[name]) for name in white)
    assert json.loads((folder / "white" / "adapter_config.json").read_text())["r"] == 4
    result = turnwise.train(
        environment=Game,
        data=ROWS,
        resume=trained,
        progress=False,
        **{"training.steps": 3, "eval.every": 0},
    )
    row = metrics_of(Path(result.folder))[-1]
    assert (row["step"], row["weight_version"]) == (3, 12)
    assert row["logprob_diff_max"] < 1e-4


def test_checkpoints_are_played_without_training(trained: Path, path: Path) -> None:
    folder = trained / "checkpoints" / "step-0002" / "policies"
    adapters = {name: str(folder / name) for name in ("white", "black")}
    result = turnwise.rollout(
        config=path,
        environment=Game,
        data=[ROWS[0] | {"named": "white"}, *FROZEN[:1]],
        name="played",
        **{"serving.adapters": adapters, "rollout": KEYS["rollout"]},
        sampling=SAMPLING | {"n": 1},
    )
    assert [t.turns[0].adapter for t in result] == ["white", ""]


def test_a_loop_of_a_program_trains_each_policy_by_its_samples(
    ray_started: None, path: Path
) -> None:
    with turnwise.open(path, Game, ROWS, name="own", **KEYS) as run:
        before = run.sample("Hello", policy="white", temperature=0)
        assert before == run.sample("Hello", policy="base", temperature=0)
        batch = run.samples(run.rollout(run.problems(2)))
        assert {sample.policy for sample in batch.samples} == {"white", "black"}
        white = [sample for sample in batch.samples if sample.policy == "white"]
        run.forward_backward(white)
        metrics = run.optim_step(learning_rate=0.5)
        assert metrics["grad_norm"] > 0
        assert run.sync() == 1
        scored = run.logprobs(white)
        assert scored == run.logprobs(white, model="white")
        assert scored != run.logprobs(white, model="black")
        base = run.sample([5, 6, 7], policy="base", temperature=0)
        assert run.sample([5, 6, 7], policy="black", temperature=0) == base  # never updated
        assert run.sample([5, 6, 7], policy="white", temperature=0) != base
        with pytest.raises(InputError, match="no policy 'grey': name white or black or base"):
            run.sample("Hello", policy="grey")


def tree_of(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the tree of a configuration of two policies, with changes by dotted key."""
    keys: dict[str, Any] = {
        "rollout.loop": "self_play",
        "rollout.policies": ["white", "black"],
        "model.lora.rank": 4,
        "weights.lora": "adapter",
        "model.path": "m",
        "data.path": "d.jsonl",
        "environment": "a:B",
    }
    tree: dict[str, Any] = {}
    for key, value in (keys | changes).items():
        at = tree
        *parents, last = key.split(".")
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = value
    return tree


def test_supervised_training_is_of_one_policy() -> None:
    assert supervised_config(parse_config(tree_of({}))).policies == ["policy"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout.policies": ["base"]}, "'base' cannot be a policy's name"),
        ({"rollout.policies": ["a.b"]}, "'a.b' cannot be a policy's name"),
        ({"rollout.policies": ["white", "white"]}, "the same name is there twice"),
        ({"model.lora.rank": 0}, "each policy is an adapter: set model.lora.rank"),
        ({"weights.lora": "merged"}, "weights.lora to adapter"),
        ({"rollout.loop": "interleaved"}, "the loop interleaved has no players"),
        ({"algorithm.advantage.name": "gae"}, "several policies cannot be trained"),
        ({"algorithm.loss.name": "dpo"}, "several policies cannot be trained"),
    ],
)
def test_what_cannot_be_several_policies_is_one_sentence(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        parse_config(tree_of(changes))


def test_a_run_of_one_policy_has_no_frozen_one(ray_started: None, path: Path) -> None:
    one = {"sampling": SAMPLING | {"n": 2}, "rollout.loop": "self_play", "serving.workers": 1}
    with turnwise.open(path, Game, ROWS, name="alone", progress=False, **one) as run:
        with pytest.raises(InputError, match=r"no policy 'base': name policy"):
            run.sample("Hello", policy="base")
        with pytest.raises(TurnwiseError, match=r"Game.policies names policies, and this run has"):
            run.rollout(FROZEN[:1])


@pytest.mark.parametrize("named", ["grey", "policy"])
def test_a_player_without_a_policy_is_one_sentence(
    ray_started: None, path: Path, named: str
) -> None:
    with pytest.raises(TurnwiseError, match=r"Game.policies must name the policy of white: white"):
        turnwise.train(
            config=path,
            environment=Game,
            data=[row | {"named": named} for row in ROWS],
            name=named,
            **KEYS,
        )
