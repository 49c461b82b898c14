"""Find the number: its rewards, its inattentive player, and a short run from nothing."""

import itertools
import json
import math
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from examples.guess.environment import LARGEST, NO_NUMBER, Guess, read_guess
from examples.guess.run import curve, game
from examples.guess.warm_start import TURNS, games, inattentive_guess
from examples.step06_simulated_user.environment import STOP, instructions
from examples.step06_simulated_user.user import conversations
from tests.conftest import ROOT, command_environment, python
from turnwise.trajectory import Trajectory


def play(number: int, *guesses: str) -> tuple[Guess, list[str | None]]:
    environment = Guess({"number": number})
    answers = [environment.step({"role": "assistant", "content": guess}) for guess in guesses]
    return environment, answers


def test_each_turn_earns_its_share_of_the_search() -> None:
    environment, answers = play(37, "25", "45", "37")
    assert answers == ["higher", "lower", None]
    reward = environment.reward(None)
    assert reward.turns == pytest.approx(
        [0.5 * math.log(a / b) / math.log(50) for a, b in itertools.pairwise([50, 25, 19, 1])]
    )
    assert reward.final == 1.0
    assert reward.total == pytest.approx(1.5)
    assert environment.metrics(None) == {"found": 1.0, "numbers_left": 1.0}


def test_a_guess_that_rules_nothing_out_earns_nothing() -> None:
    environment, answers = play(37, "25", "25", "10", "no", "51", "")
    assert answers == ["higher", "higher", "higher", NO_NUMBER, "lower", NO_NUMBER]
    reward = environment.reward(None)
    assert reward.turns[1:] == [0.0] * 5
    assert reward.total == pytest.approx(0.5 * math.log(2) / math.log(50))
    assert environment.metrics(None) == {"found": 0.0, "numbers_left": 25.0}


def test_halving_finds_every_number_within_six_guesses() -> None:
    for number in range(1, LARGEST + 1):
        environment = Guess({"number": number})
        for _ in range(TURNS):
            middle = str((environment.low + environment.high) // 2)
            if environment.step({"content": middle}) is None:
                break
        assert environment.found, number


@pytest.mark.parametrize("text", ["7", " 50\n", "00"])
def test_a_guess_is_a_number_and_nothing_else(text: str) -> None:
    assert read_guess(text) == int(text)
    for wrong in (f"{text} or 8", f"-{text.strip()}", f"{text.strip()}.0", "\u0667", "123", ""):
        assert read_guess(wrong) is None, wrong


def test_the_player_is_inattentive_and_leaves_room_to_learn() -> None:
    played = list(itertools.islice(games(0), 1000))
    won = sum(messages[-1]["role"] == "assistant" for messages in played) / len(played)
    assert 0.2 < won < 0.7
    rng = random.Random(0)
    answers = [(10, "higher"), (12, "lower")]
    guesses = [inattentive_guess(answers, rng) for _ in range(200)]
    assert 11 in guesses
    assert any(guess != 11 for guess in guesses)


def test_the_users_model_learns_the_right_answers() -> None:
    for messages in itertools.islice(conversations(0), 50):
        number = next(n for n in range(1, LARGEST + 1) if instructions(n) == messages[0]["content"])
        for asked, answer in itertools.pairwise(messages[1:]):
            if asked["role"] == "user":
                right = Guess({"number": number}).step(asked)
                assert answer["content"] == (STOP if right is None else right)


def test_the_curve_and_a_game_are_lines() -> None:
    steps: list[dict[str, Any]] = [
        {"step": 0, "accuracy_heldout": 0.25},
        {"step": 1, "accuracy_heldout": None},
        {"step": 5, "accuracy_heldout": 0.5},
    ]
    bars = ["#" * 10, "#" * 20]
    assert curve(steps) == [f"step   0   0.250  {bars[0]}", f"step   5   0.500  {bars[1]}"]
    trajectory = Trajectory("rows:1")
    trajectory.messages = [{"content": text} for text in ("Find my number.", "25", "higher", "30")]
    assert game(trajectory) == "25, higher, 30"


def test_a_short_run_from_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(*python(), "-m", "examples.guess.run", "--build", str(tmp_path), "--updates", "3"),
            *(
                f"output_dir={tmp_path}",
                "training.steps=1",
                "training.threads=1",
                "eval.every=1",
                "sampling.n=2",
            ),
            *("rollout.prompts_per_step=4", "rollout.max_turns=2", "eval.sampling.n=1"),
        ],
        cwd=ROOT,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Games in which the number was found" in done.stdout
    (metrics,) = tmp_path.glob("guess-seed0*/metrics.jsonl")
    first, last = (json.loads(line) for line in metrics.open())
    assert (first["step"], last["step"], last["trajectories"]) == (0, 1, 8)
    assert last["dropped"] == {}
    assert last["exact_percent"] == 100.0
    assert set(last["env"]) == {"found", "numbers_left"}
