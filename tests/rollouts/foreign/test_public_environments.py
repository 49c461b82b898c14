"""Environments of public packages, by the packages themselves, which `make envs` installs."""

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import turnwise
from tests.conftest import ROOT, own_environment
from tests.rollouts.foreign.test_openenv import Scripted, call
from turnwise.compat.reasoning_gym import ReasoningGym
from turnwise.config import Config, RolloutConfig, SamplingConfig
from turnwise.errors import InputError
from turnwise.rollouts import Group, Problem, Runner
from turnwise.rollouts.environment import load_environment, make_rows, with_arguments
from turnwise.rollouts.episode import Episode
from turnwise.trajectory import Trajectory, audit, read_jsonl

HERE = "tests.rollouts.foreign.test_public_environments"
FOLDER = ROOT / ".venv-envs"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def packages() -> Iterator[None]:
    """The packages, beside this process's own, which come first."""
    subprocess.run(["make", "-s", f"{FOLDER.name}/.installed"], cwd=ROOT, check=True)
    sys.path.append(str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


@pytest.fixture
def run(make_config: Callable[..., Config], tokenizer: Any) -> Callable[..., Any]:
    async def run(
        name: str, texts: Sequence[str], row: Any, n: int = 1, *, arguments: Any = None, **more: Any
    ) -> Group:
        model = {"path": make_config().model.path, "max_length": 100_000}
        rollout = {"loop": "tool_calling", **more}
        config = make_config(
            environment=name, environment_args=arguments or {}, model=model, rollout=rollout
        )
        engine, sampling = Scripted(texts, tokenizer), SamplingConfig(n=n, max_tokens=512)
        runner = Runner(config, tokenizer)
        group = await runner.run_group(engine, Problem("rows:1", row), sampling, "t")
        assert group.dropped == {}, group.causes
        for trajectory in group.trajectories:
            assert audit(trajectory).first_violation is None
        return group

    return run


def made(name: str, split: str = "train", **arguments: Any) -> Sequence[dict[str, Any]]:
    return make_rows(with_arguments(load_environment(name), arguments), split)


async def opened(name: str, row: Any, **arguments: Any) -> Episode:
    kind = with_arguments(load_environment(name), arguments)
    episode = Episode(kind, Problem("rows:1", row), RolloutConfig())
    await episode.open()
    return episode


def said(trajectory: Trajectory, role: str) -> list[str]:
    return [message["content"] for message in trajectory.messages if message["role"] == role]


def test_problems_of_a_dataset_and_others_held_out() -> None:
    training = made("reasoning_gym:chain_sum", size=50, min_digits=2, max_digits=2)
    assert len(training) == 50
    assert all(row["question"].endswith("=") for row in training)
    assert made("reasoning_gym:chain_sum", size=50, min_digits=2, max_digits=2) == training
    assert made("reasoning_gym:chain_sum", size=50, min_digits=2, max_digits=2, seed=1) != training
    small = {"size": 120, "min_terms": 2, "max_terms": 2, "max_digits": 1}
    asked = Counter(row["question"] for row in made("reasoning_gym:chain_sum", **small))
    held = Counter(row["question"] for row in made("reasoning_gym:chain_sum", "eval", **small))
    assert held
    assert max(held.values()) == 1
    assert not asked.keys() & held.keys()
    with pytest.raises(InputError, match=r"every held-out question is one of training: lower"):
        made("reasoning_gym:chain_sum", "eval", **{**small, "size": 4000})


async def test_a_datasets_own_score_of_the_answer(run: Callable[..., Any]) -> None:
    (row,) = made("reasoning_gym:chain_sum", size=1)
    answer = row["answer"]
    for text, reward in (
        (f"I add them. <answer> {answer} </answer>", 1.0),
        (answer, 1.0),
        ("<answer>nothing</answer>", 0.0),
    ):
        group = await run("reasoning_gym:chain_sum", [text], row)
        (trajectory,) = group.trajectories
        assert trajectory.reward == pytest.approx(reward, abs=0.02)
        assert len(trajectory.turns) == 1
    first, *_ = trajectory.messages
    assert first["role"] == "system"
    assert "<answer>" in first["content"]
    episode = await opened("reasoning_gym:chain_sum", row, system_prompt=None)
    assert [message["role"] for message in episode.problem] == ["user"]
    episode = await opened("reasoning_gym:chain_sum", row, system_prompt="Be brief.")
    assert episode.problem[0]["content"] == "Be brief."


def test_the_levels_of_a_curriculum() -> None:
    def terms(**arguments: Any) -> set[int]:
        rows = made("reasoning_gym:chain_sum", size=60, **arguments)
        return {row["metadata"]["num_terms"] for row in rows}

    assert terms(curriculum=0) == {2}
    assert terms(curriculum={"num_terms": 2}) == {2, 3, 4}
    assert terms(curriculum={"*": 1, "num_digits": 3}) == {2, 3}
    for arguments, message in (
        ({"curriculum": {"num_trms": 1}}, "num_trms"),
        ({"curriculum": {"num_terms": 99}}, "Invalid level: 99"),
        ({"min_trms": 1}, "min_trms"),
        ({"min_terms": 5, "max_terms": 2}, "max_terms must be >= min_terms"),
    ):
        with pytest.raises(InputError, match=rf"^environment_args: reasoning_gym.*{message}"):
            terms(**arguments)


async def test_a_subclass_gives_a_dataset_tools() -> None:
    class Sums(ReasoningGym):
        dataset = "chain_sum"

        def __init__(self, row: dict[str, Any], **config: Any) -> None:
            super().__init__(row, **config)
            self.tools = [self.add]

        def add(self, a: int, b: int) -> int:
            """Add two numbers.

            Args:
                a: The first number.
                b: The second number.
            """
            return a + b

    kind = with_arguments(Sums, {"size": 3})
    rows = make_rows(kind, "eval")
    assert len(rows) == 3
    episode = Episode(kind, Problem("rows:1", rows[0]), RolloutConfig())
    await episode.open()
    assert episode.toolbox.names == ["add"]
    assert episode.environment.score(f"<answer>{rows[0]['answer']}</answer>") == 1.0


async def test_a_walk_over_the_lake(run: Callable[..., Any]) -> None:
    name, walk = "gymnasium:FrozenLake-v1", ["[1]", "[down]", "I go [right]", "2", "move down", "2"]
    arguments = {"is_slippery": False}
    group = await run(name, walk, {"seed": 0}, arguments=arguments, max_turns=20)
    (trajectory,) = group.trajectories
    assert trajectory.status == "completed"
    assert trajectory.turn_rewards == [0.0] * 5 + [1.0]
    assert trajectory.metrics == {"steps": 6, "answers_without_action": 0}
    problem, *boards = said(trajectory, "user")
    assert "Actions: 0 (Move left), 1 (Move down), 2 (Move right), 3 (Move up)." in problem
    assert "[S]FFF\nFHFH\nFFFH\nHFFG" in problem
    assert boards[0] == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    lost = await run(name, ["[1]", "[2]"], {"seed": 0}, arguments=arguments)
    assert lost.trajectories[0].reward == 0.0
    assert len(lost.trajectories[0].turns) == 2


async def test_an_episode_is_truncated_and_answers_may_lack_an_action(
    run: Callable[..., Any],
) -> None:
    arguments = {"is_slippery": False, "max_episode_steps": 3}
    group = await run(
        "gymnasium:FrozenLake-v1", ["hm", "[7]", "[0]"], {"seed": 0}, arguments=arguments
    )
    (trajectory,) = group.trajectories
    assert (trajectory.status, len(trajectory.turns)) == ("completed", 5)
    assert trajectory.metrics == {"steps": 3, "answers_without_action": 2}
    assert said(trajectory, "user")[1].startswith("There is no action in your answer. Answer with")


async def test_actions_as_a_tool(run: Callable[..., Any]) -> None:
    texts = [call("act", f'{{"action": {action}}}') for action in (1, 9, 1, 2)]
    arguments = {"is_slippery": False, "tool": True}
    group = await run("gymnasium:FrozenLake-v1", texts, {"seed": 0}, arguments=arguments)
    (trajectory,) = group.trajectories
    assert trajectory.events["tool_bad_arguments"] == 1
    assert (len(trajectory.turns), trajectory.metrics["steps"]) == (6, 5)
    assert "Answer with" not in said(trajectory, "user")[0]


@pytest.mark.parametrize(
    ("name", "problem", "reply"),
    [
        ("Blackjack-v1", "The dealer shows", "Your cards: "),
        ("Taxi-v4", "The passenger waits at", "The taxi is in row"),
        ("CliffWalking-v1", "x  C  C  C", "o  o  o"),
        ("CartPole-v1", "pole", "["),
    ],
)
async def test_the_text_of_an_observation(
    name: str, problem: str, reply: str, run: Callable[..., Any]
) -> None:
    arguments = {"max_episode_steps": 4}
    rows = made(f"gymnasium:{name}", rows=8)
    for row in rows:
        group = await run(f"gymnasium:{name}", ["[1]"], row, arguments=arguments)
        (trajectory,) = group.trajectories
        assert problem in said(trajectory, "user")[0]
        assert "\x1b" not in said(trajectory, "user")[0]
        assert all(reply in text for text in said(trajectory, "user")[1:])
    again = await opened(f"gymnasium:{name}", rows[0])
    same = await opened(f"gymnasium:{name}", rows[0])
    assert again.problem == same.problem


async def test_actions_of_other_spaces_and_errors(run: Callable[..., Any]) -> None:
    group = await run(
        "gymnasium:Pendulum-v1", ["[0.5]"], {"seed": 1}, arguments={"max_episode_steps": 3}
    )
    (trajectory,) = group.trajectories
    assert trajectory.metrics == {"steps": 3, "answers_without_action": 0}
    assert trajectory.reward is not None
    assert trajectory.reward < 0
    with pytest.raises(InputError, match=r"^environment: gymnasium:FrozenLak-v1: .*FrozenLake"):
        load_environment("gymnasium:FrozenLak-v1")
    with pytest.raises(turnwise.TrajectoryError, match=r"environment_args: .*slippery"):
        await opened("gymnasium:FrozenLake-v1", {"seed": 1}, slippery=True)


async def test_a_game_of_one_player(run: Callable[..., Any]) -> None:
    random.seed(11)
    before = random.getstate()
    name, (row, *_) = "textarena:GuessTheNumber-v0", made("textarena:GuessTheNumber-v0", rows=4)
    episode = await opened(name, row)
    number = episode.environment.env.game_number
    assert random.getstate() == before
    others = [5 if number != 5 else 6, "nothing", number]
    group = await run(name, [f"I say [{guess}]." for guess in others], row, n=3)
    for trajectory in group.trajectories:
        assert (trajectory.status, trajectory.reward) == ("completed", 1.0)
        first, hint, advice = said(trajectory, "user")
        assert "Guess The Number" in first
        assert hint in ("The target number is higher.", "The target number is lower.")
        assert "You attempted an invalid move" in advice
        assert trajectory.metrics == {"game_ended": 1.0, "game_invalid_moves": 0.0}


async def test_two_players_of_one_policy(run: Callable[..., Any]) -> None:
    name, row = "textarena:TicTacToe-v0", {"seed": 3}
    moves = [f"[{cell}]" for cell in (0, 3, 1, 4, 2)]
    rollout = {"loop": "self_play", "max_turns": 9}
    group = await run(name, moves, row, n=2, arguments={"players": 2}, **rollout)
    for trajectory in group.trajectories:
        assert trajectory.turn_players == ["Player 0", "Player 1"] * 2 + ["Player 0"]
        assert trajectory.status == "completed"
        assert trajectory.reward == 0.0
        assert trajectory.reward_parts == {"environment": 0.0, "Player 0": 1.0, "Player 1": -1.0}
        assert len(trajectory.branches()) == 2
        heard = [m["content"] for m in trajectory.messages if m.get("to") == "Player 1"]
        assert "[Player 0] [0]" in heard[0]
        assert "Available Moves" in heard[0]
    unfinished = await run(
        name, moves[:2], row, arguments={"players": 2}, loop="self_play", max_turns=2
    )
    assert set(unfinished.trajectories[0].reward_parts.values()) == {0.0}
    with pytest.raises(turnwise.TrajectoryError, match=r"set environment_args\.players"):
        await opened(name, row)


def first_free(observation: str) -> str:
    """An opponent."""
    assert "Available Moves" in observation
    return observation.rpartition("Available Moves: ")[2].split(",")[0].strip(" '")


@pytest.mark.parametrize("opponent", ["random", f"{HERE}:first_free"])
async def test_an_opponent_plays_the_other_seat(opponent: str, run: Callable[..., Any]) -> None:
    name = "textarena:TicTacToe-v0"
    for seat in (0, 1):
        arguments = {"players": 2, "opponent": opponent, "seat": seat}
        texts = [f"[{cell}]" for cell in (8, 7, 6, 5, 4, 3, 2, 1, 0)]
        group = await run(name, texts, {"seed": 5}, n=2, arguments=arguments, max_turns=20)
        one, other = group.trajectories
        assert one.messages == other.messages
        assert one.metrics["game_ended"] == 1.0
        assert one.reward in (-1.0, 0.0, 1.0)
        assert "You are Player " + str(seat) in said(one, "user")[0]


async def test_skyrls_environments_on_its_rows(run: Callable[..., Any]) -> None:
    row = {
        "prompt": [{"role": "user", "content": "How much is 40 + 2?"}],
        "reward_spec": {"method": "rule", "ground_truth": "42"},
        "extra_info": {"index": 0},
    }
    for text, reward in (("It is 42.\n#### 42", 1.0), ("#### 41", 0.0)):
        group = await run("skyrl_gym:gsm8k", [text], row)
        assert group.trajectories[0].reward == reward
    single = await run("skyrl_gym:gsm8k", ["#### 42"], row, loop="single_turn")
    assert single.trajectories[0].reward == 1.0
    group = await run(
        "skyrl_gym:gsm8k_multi_turn", ["#### 41", "hm", "#### 42"], row, arguments={"max_turns": 4}
    )
    (trajectory,) = group.trajectories
    assert trajectory.turn_rewards == [pytest.approx(0.05), 0.0, 1.0]
    assert trajectory.metrics == {"steps": 3}
    assert "tentative numeric answer" in said(trajectory, "user")[1]
    episode = await opened("skyrl_gym:search", row, search_url="http://127.0.0.1:1/retrieve")
    assert episode.problem == row["prompt"]
    with pytest.raises(turnwise.TrajectoryError, match=r"environment_args: .*serch_url"):
        await opened("skyrl_gym:search", row, serch_url="x")
    with pytest.raises(InputError, match=r"data\.path: SkyRLGym makes no rows"):
        made("skyrl_gym:gsm8k")
    with pytest.raises(InputError, match="did you mean skyrl_gym:gsm8k"):
        load_environment("skyrl_gym:gsm8")


def calls_of(texts: Sequence[str], functions: Any) -> list[str]:
    """Return written calls, such as `cd(folder='x')`, in the model's format."""
    import ast

    parameters = {f["name"]: list(f["parameters"]["properties"]) for f in functions}
    written = []
    for text in texts:
        tree = ast.parse(text, mode="eval").body
        assert isinstance(tree, ast.Call)
        assert isinstance(tree.func, ast.Name)
        name = tree.func.id
        given = dict(zip(parameters[name], map(ast.literal_eval, tree.args), strict=False))
        given |= {k.arg: ast.literal_eval(k.value) for k in tree.keywords if k.arg}
        written.append(call(name, json.dumps(given)))
    return written


@pytest.mark.parametrize("category", ["multi_turn_base", "multi_turn_miss_func"])
async def test_only_the_true_calls_of_bfcl_earn_the_reward(
    category: str, run: Callable[..., Any]
) -> None:
    from turnwise.compat.bfcl import _entries

    name = f"bfcl:{category}"
    rows = made(name, "eval")
    assert len(rows) == 200
    right = 0
    for row in rows[:6]:
        entry, answers = _entries(category)[row["id"]]
        later = [f for functions in entry.get("missed_function", {}).values() for f in functions]
        texts = list[str]()
        for request in answers:
            if request:
                texts.append("\n".join(calls_of(request, [*entry["function"], *later])))
            texts.append("Done.")
        group = await run(name, texts, row, max_turns=100)
        (trajectory,) = group.trajectories
        assert trajectory.metrics == {category: trajectory.reward}
        right += int(trajectory.reward or 0.0)
        idle = await run(name, ["Done."], row, max_turns=100)
        assert idle.trajectories[0].reward == 0.0
        assert len(idle.trajectories[0].turns) == len(answers)
        cut = await run(name, texts, row, max_turns=len(texts) - 2)
        assert cut.trajectories[0].reward == 0.0
        if later:
            assert any("I have updated some more functions" in t for t in said(trajectory, "user"))
            described = json.dumps(said(trajectory, "user")[0]) + str(entry["function"])
            assert f"'name': '{later[0]['name']}'" not in described
    assert right == 6
    utils = sys.modules["bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils"]
    assert not [key for key in vars(utils) if key.startswith("turnwise")]


async def test_every_entry_of_bfcl_can_be_opened() -> None:
    rows = made("bfcl:multi_turn", "eval")
    assert len(rows) == 800
    for row in rows[::7]:
        episode = await opened("bfcl:multi_turn", row)
        assert episode.toolbox.names
        for schema in episode.toolbox.schemas:
            assert schema["function"]["parameters"]["type"] == "object"
            assert "dict" not in str(schema["function"]["parameters"].get("type"))


def test_bfcls_entries_of_one_scenario_are_on_one_side() -> None:
    def numbers(split: str) -> set[str]:
        return {row["id"].rpartition("_")[2] for row in made("bfcl:multi_turn", split, train=0.8)}

    assert (len(numbers("train")), len(numbers("eval"))) == (160, 40)
    assert not numbers("train") & numbers("eval")
    with pytest.raises(InputError, match=r"bfcl has no train rows with environment_args\.train 0"):
        made("bfcl:multi_turn_base")
    with pytest.raises(InputError, match="did you mean bfcl:multi_turn_base"):
        load_environment("bfcl:multi_turn_bas")


def test_the_command_line_evaluates_a_public_environment(
    make_config: Callable[..., Config],
) -> None:
    config = make_config()
    changes = [
        "environment=gymnasium:Blackjack-v1",
        "environment_args.rows=6",
        f"model.path={config.model.path}",
        "model.max_length=1024",
        "data={path: environment, eval_path: environment}",
        f"output_dir={config.output_dir}",
        "rollout={max_turns: 2, environment_process: true}",
        "eval.sampling={n: 1, max_tokens: 8}",
        "engine.kv_cache_gib=0.125",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "turnwise.cli", "eval", "examples/calculator/config.yaml", *changes],
        cwd=ROOT,
        env={**own_environment(), "PYTHONPATH": str(FOLDER)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "answers_without_action " in done.stdout
    assert "trajectories 6  dropped {}" in done.stdout
    (file,) = [line for line in done.stdout.splitlines() if line.endswith("eval.jsonl")]
    trajectories = list(read_jsonl(Path(file)))
    assert [trajectory.problem_id for trajectory in trajectories] == [
        f"eval:{number}" for number in range(1, 7)
    ]
