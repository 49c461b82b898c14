"""Games whose sides the policy plays: a view, a branch and a reward for each player.

The engine is simulated: its tokens mean nothing, and every turn is text without a call.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import turnwise
from tests.rollouts.test_episode import Talking
from turnwise.compat.chatlearn.outputs import rewarded_groups
from turnwise.config import Config, SamplingConfig, parse_config
from turnwise.errors import InputError
from turnwise.rollouts import Group, Problem, Runner
from turnwise.training.algorithms import make_algorithm
from turnwise.training.samples import RewardRules, gives_signal, make_samples
from turnwise.trajectory import Trajectory, audit


class Duel(turnwise.Environment):
    """White asks, black answers, white asks again; black hears only the last question."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.players = {
            "white": [{"role": "system", "content": "Ask."}, {"role": "user", "content": "Begin."}],
            "black": "Answer.",
        }
        self.row = row
        self.moves: list[str] = []

    def step(self, message: dict[str, Any]) -> Any:
        self.moves.append(message["name"])
        if "move" in self.row:
            return self.row["move"]
        match self.moves:
            case ["white"]:
                return {"black": "He asks."}
            case ["white", "black"]:
                return {"white": [{"role": "user", "content": "He says."}]}
            case ["white", "black", "white"]:
                return {"black": ""}
        return None

    def reward(self, trajectory: Trajectory) -> Any:
        if "reward" in self.row:
            return self.row["reward"]
        win = float(trajectory.sample_index)
        return turnwise.Rewards(1.0, turns=[0.5], players={"white": win, "black": -win})


class Alike(Duel):
    """Both players read the same, so the second's branch begins within the first's prompt."""

    def __init__(self, row: dict[str, Any]) -> None:
        super().__init__(row)
        self.players = {"white": "Play.", "black": "Play."}

    def step(self, message: dict[str, Any]) -> Any:
        return {"black": ""} if message["name"] == "white" else None


class Nobody(turnwise.Environment):
    """No game."""

    problem = "Play."

    def __init__(self, row: dict[str, Any]) -> None: ...

    def reward(self, trajectory: Trajectory) -> float:
        return 0.0


@pytest.fixture
def play(make_config: Callable[..., Config], tokenizer: Any) -> Callable[..., Any]:
    async def play(environment: Any, row: Any = None, n: int = 1, **rollout: Any) -> Group:
        config = make_config(rollout={"loop": "self_play", **rollout})
        runner = Runner(config, tokenizer, environment)
        problem = Problem("rows:1", row or {})
        sampling = SamplingConfig(n=n, max_tokens=8)
        return await runner.run_group(Talking(vocab_size=256), problem, sampling, "t")

    return play


@pytest.mark.parametrize("process", [False, True])
async def test_each_player_has_a_view_and_a_branch(
    play: Callable[..., Any], tokenizer: Any, process: bool
) -> None:
    (trajectory,) = (await play(Duel, environment_process=process)).trajectories
    assert trajectory.turn_players == ["white", "black", "white", "black"]
    assert trajectory.status == "completed"
    white, black = trajectory.branches()
    assert (white.leaf, black.leaf) == (2, 3)
    views = [tokenizer.decode(branch.token_ids) for branch in (white, black)]
    assert [("Begin." in view, "He says." in view, "He asks." in view) for view in views] == [
        (True, True, False),
        (False, False, True),
    ]
    sampled = {
        player: [
            token
            for turn, who in zip(trajectory.turns, trajectory.turn_players, strict=True)
            for token in turn.completion_token_ids
            if who == player
        ]
        for player in ("white", "black")
    }
    for branch, player in ((white, "white"), (black, "black")):
        trained = np.array(branch.token_ids)[np.array(branch.response_mask, dtype=bool)]
        assert trained.tolist() == sampled[player]
    audit(trajectory, trajectory.samples())
    said = [(m["role"], m.get("name") or m.get("to")) for m in trajectory.messages]
    assert said == [
        ("assistant", "white"),
        ("user", "black"),
        ("assistant", "black"),
        ("user", "white"),
        ("assistant", "white"),
        ("assistant", "black"),
    ]
    assert [m["content"] for m in trajectory.turns[3].messages if m["role"] == "user"] == [
        "Answer.",
        "He asks.",
    ]
    assert Trajectory.from_json(trajectory.to_json()) == trajectory


async def test_each_player_has_a_reward(play: Callable[..., Any]) -> None:
    _, second = (await play(Duel, n=2)).trajectories
    assert second.player_rewards == {"white": 2.5, "black": 0.0}
    assert second.reward == 1.25
    assert second.reward_parts == {"environment": 1.5, "white": 1.0, "black": -1.0}


async def test_players_with_one_opening_share_its_ids_only(play: Callable[..., Any]) -> None:
    (trajectory,) = (await play(Alike)).trajectories
    samples = trajectory.samples()
    report = audit(trajectory, samples)
    assert report.tokens_sampled == sum(sum(sample.response_mask) for sample in samples)
    first, second = trajectory.turns
    assert second.prefix_length >= len(first.added_token_ids)


@pytest.mark.parametrize(
    ("environment", "row", "message"),
    [
        (Duel, {"move": {"grey": "x"}}, r"Duel.step must return .*not \{'grey': 'x'\}; players: "),
        (Duel, {"move": "x"}, "Duel.step must return the next player"),
        (Duel, {"reward": turnwise.Rewards(players={"grey": 1.0})}, "gave a reward to grey; .*whi"),
    ],
)
async def test_mistakes_are_named(
    play: Callable[..., Any], environment: type, row: dict[str, Any], message: str
) -> None:
    group = await play(environment, row)
    (cause,) = group.causes.values()
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(cause)


async def test_the_loop_needs_players(play: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match=r"self_play: Nobody.players must give"):
        await play(Nobody)


async def test_too_many_turns_end_the_game(play: Callable[..., Any]) -> None:
    (trajectory,) = (await play(Duel, max_turns=3)).trajectories
    assert (trajectory.status, len(trajectory.turns)) == ("max_turns", 3)


def game(index: int, white: float, black: float) -> Trajectory:
    """Two turns of each player, two tokens a turn."""
    trajectory = Trajectory("rows:1", index)
    ids = {"white": [1, 2], "black": [3, 4]}
    for turn in range(4):
        player = ("white", "black")[turn % 2]
        sampled = [10 + turn, 20 + index]
        trajectory.add_turn(ids[player], sampled, [-0.5, -0.5], [0, 0], "stop")
        ids[player] += [*sampled, 5]
        trajectory.turn_players.append(player)
    trajectory.set_outcome(players={"white": white, "black": black})
    trajectory.set_outcome(reward=(white + black) / 2)
    trajectory.status = "completed"
    return trajectory


def config_of(algorithm: dict[str, Any]) -> Config:
    tree = {"environment": "a:B", "model": {"path": "m"}, "data": {"path": "d"}}
    return parse_config({**tree, "algorithm": algorithm})


def test_a_player_is_compared_with_itself() -> None:
    """A game of zero sum: every mean is 0, and each side still learns."""
    config = config_of({"advantage": {"name": "dr_grpo"}})
    group = Group("rows:1", [game(0, 1.0, -1.0), game(1, 0.0, 0.0)])
    assert gives_signal(group, RewardRules.of(config), make_algorithm(config.algorithm))
    samples = make_samples([group], config, version=0).samples
    # White's branch, then black's, of each game.
    assert [sample.advantage for sample in samples] == [0.5, -0.5, -0.5, 0.5]
    equal = Group("rows:1", [game(0, 1.0, -1.0), game(1, 1.0, -1.0)])
    assert not gives_signal(equal, RewardRules.of(config), make_algorithm(config.algorithm))


def test_dynamic_sampling_of_pairs_compares_rewards_of_games() -> None:
    """The players' rewards differ, those of the games do not: there is no best and no worst."""
    config = config_of({"loss": "dpo"})
    group = Group("rows:1", [game(0, 1.0, -1.0), game(1, 0.0, 0.0)])
    assert not gives_signal(group, RewardRules.of(config), make_algorithm(config.algorithm))
    assert not make_samples([group], config, version=0).samples


def test_a_pipeline_gives_each_player_a_reward() -> None:
    config = config_of({"advantage": {"name": "dr_grpo"}})
    group = Group("rows:1", [game(0, 1.0, -1.0), game(1, 0.0, 0.0)])
    rewards: list[object] = [{"white": 4.0, "black": 0.0}, {"black": 2, "white": 2}]
    rewarded_groups({"groups": [group], "rewards": rewards})
    assert [trajectory.reward for trajectory in group.trajectories] == [2.0, 2.0]
    samples = make_samples([group], config, version=0).samples
    assert [sample.advantage for sample in samples] == [1.0, -1.0, -1.0, 1.0]
    unchanged = [trajectory.reward for trajectory in group.trajectories]
    rewarded_groups({"groups": [group], "rewards": unchanged})
    assert group.trajectories[0].player_rewards == {"white": 4.0, "black": 0.0}


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (5.0, "one number for a game, .*: give a dictionary with a number for each of white, blac"),
        ({"white": 1.0}, "one finite number for each of 1 trajectories"),
        ({"white": 1.0, "black": 0.0, "red": 0.0}, "one finite number for each of 1 trajectories"),
        ({"white": 1.0, "black": float("nan")}, "one finite number for each of 1 trajectories"),
    ],
)
def test_a_game_reward_that_would_go_unused_is_refused(reward: object, message: str) -> None:
    one = game(0, 1.0, -1.0)
    with pytest.raises(InputError, match=message):
        rewarded_groups({"groups": [Group("rows:1", [one])], "rewards": [reward]})
    assert (one.reward, one.player_rewards) == (0.0, {"white": 1.0, "black": -1.0})
    one.turn_players = []
    one.set_outcome(players={})
    with pytest.raises(InputError, match="one finite number for each of 1 trajectories"):
        rewarded_groups({"groups": [Group("rows:1", [one])], "rewards": [{"white": 1.0}]})


def test_turns_of_a_player_are_compared_with_its_own() -> None:
    config = config_of({"advantage": {"name": "turn_returns", "scale": False, "gamma": 0.5}})
    first, second = game(0, 1.0, 0.0), game(1, 0.0, 0.0)
    first.set_outcome(turns=[1.0, 0.0, 0.0, 0.0])
    group = Group("rows:1", [first, second])
    batch = make_samples([group], config, version=0).samples
    by_turn = [dict(zip(s.calls_T.tolist(), s.advantages_T.tolist(), strict=True)) for s in batch]
    assert [{t: a for t, a in turns.items() if t >= 0} for turns in by_turn] == [
        {0: 0.5, 2: 0.0},
        {1: 0.0, 3: 0.0},
        {0: -0.5, 2: 0.0},
        {1: 0.0, 3: 0.0},
    ]


def test_a_value_model_ends_each_branch_with_its_players_reward() -> None:
    config = config_of({"advantage": {"name": "gae", "model": {"path": "v"}}})
    first, second = game(0, 1.0, -1.0), game(1, 0.0, 0.0)
    first.set_outcome(turns=[0.25, 0.0, 0.0, 0.0])
    batch = make_samples([Group("rows:1", [first, second])], config, version=0).samples
    rewards = [s.advantages_T[s.advantages_T != 0].tolist() for s in batch]
    assert rewards == [[0.25, 0.75], [-1.0], [], []]
