"""The example whose model has to look: at four cards from afar, and at one of them from near."""

import itertools
import json
import random
import re
import subprocess
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pictures

import turnwise
from examples.eyes.environment import (
    COLOURS,
    SIDE,
    Eyes,
    card_of,
    digit_of,
    from_near,
    make_row,
    table,
)
from examples.eyes.model import build_model, build_tokenizer, save
from examples.eyes.run import CONFIG, game
from examples.eyes.warm_start import looked, rows
from tests.conftest import ROOT, command_environment, python
from turnwise.chat.images import read_parts
from turnwise.chat.template import load_template, load_tokenizer
from turnwise.config import Config
from turnwise.core.images import decode
from turnwise.engine.protocol import Chunk, Request
from turnwise.rollouts import Group, Problem, Runner
from turnwise.training.supervised import demonstrate
from turnwise.trajectory import ChatTemplate, Prompt, audit
from turnwise.trajectory.images import images_in

Say = Callable[[str, list[Pictures.Image]], str]
CALL = '<tool_call>\n{"name": "zoom", "arguments": {"card": %d}}\n</tool_call>'
ROW = make_row(random.Random(0))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("eyes")
    tokenizer = build_tokenizer(list(itertools.islice(rows(0), 50)))
    save(build_model(tokenizer, 0), tokenizer, folder)
    return turnwise.load_config(CONFIG, [f"model.path={folder}"])


class Player:
    """An engine that says what a function of the prompt's text and of its pictures says."""

    def __init__(self, template: ChatTemplate, say: Say) -> None:
        self.template, self.say, self.prompts = template, say, list[Prompt]()

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        self.prompts.append(request.prompt)
        pictures = [decode(one.image.read(), "a picture") for one in request.prompt.images]
        said = self.say(self.template.decode_all(request.prompt), pictures)
        ids = self.template.encode(said + "<|im_end|>")
        yield Chunk(ids, [-0.25] * len(ids), [0] * len(ids), "stop")


def seeing(prompt: str, pictures: list[Pictures.Image]) -> str:
    """Finds the card of the colour by its pixels, looks at it, and compares the digit's lines."""
    if len(pictures) == 1:
        asked = COLOURS[re.findall(r"the (\w+) card", prompt)[-1]]
        return CALL % nearest(pictures[0], asked)
    (digit,) = (
        digit
        for digit in range(10)
        if lines(from_near({"cards": [["red", digit]] * 4, "seed": 0}, 1)) == lines(pictures[1])
    )
    return str(digit)


def nearest(picture: Pictures.Image, asked: tuple[int, int, int]) -> int:
    """Return the number of the card whose colour is nearest to one, in any light."""

    def unit(colour: Any) -> np.ndarray:
        return np.array(colour) / max(np.linalg.norm(colour), 1e-9)

    corners = [(x, y) for y in (0, SIDE) for x in (0, SIDE)]
    return 1 + int(np.argmax([unit(picture.getpixel(at)) @ unit(asked) for at in corners]))


def lines(card: Pictures.Image) -> bytes:
    """Return the white lines of a card, wherever they are."""
    white = np.array(card).min(axis=2) == 255
    down, along = np.flatnonzero(white.any(axis=1)), np.flatnonzero(white.any(axis=0))
    part = white[down[0] : down[-1] + 1, along[0] : along[-1] + 1]
    return bytes(part.shape) + part.tobytes()


async def play(config: Config, say: Say, row: dict[str, Any] = ROW) -> tuple[Group, Player]:
    tokenizer = load_tokenizer(config.model)
    engine = Player(load_template(config.model, config.sampling, config.engine, tokenizer), say)
    sampling = config.sampling.model_copy(update={"n": 1})
    problem = Problem("rows:1", row)
    group = await Runner(config, tokenizer).run_group(engine, problem, sampling, "t")
    assert group.dropped == {}
    return group, engine


async def test_who_sees_looks_at_the_card_and_is_right(config: Config) -> None:
    rng = random.Random(1)
    for row in (ROW, *(make_row(rng) for _ in range(5))):
        group, _ = await play(config, seeing, row)
        (trajectory,) = group.trajectories
        assert (trajectory.reward, trajectory.status) == (1.0, "completed")
        assert trajectory.metrics == {"looked": 1.0, "found": 1.0}
        sizes = [[(i.image.width, i.length) for i in turn.images] for turn in trajectory.turns]
        assert sizes == [[(2 * SIDE, 4)], [(SIDE, 1)]]
        report = audit(trajectory)
        assert (report.violations, report.percent, report.bridged) == (0, 100.0, 1)
        assert game(trajectory) == (
            f"Which digit is on the {row['asked']} card?[image, 56 x 56]  "
            f'→ zoom({{"card": {card_of(row)}}})  [image, 28 x 28]  {digit_of(row)}'
        )


async def test_who_guesses_or_looks_twice_is_wrong(config: Config) -> None:
    wrong = str((digit_of(ROW) + 1) % 10)
    for say, looks in ((lambda *_: wrong, 0.0), (lambda *_: CALL % card_of(ROW), 1.0)):
        group, _ = await play(config, say)
        (trajectory,) = group.trajectories
        assert trajectory.reward == 0.0
        assert trajectory.metrics == {"looked": looks, "found": looks}


def test_digits_are_seen_from_near_only() -> None:
    others = {**ROW, "cards": [[colour, (digit + 1) % 10] for colour, digit in ROW["cards"]]}
    assert table(ROW, digits=False).tobytes() == table(others, digits=False).tobytes()
    for card in (1, 2, 3, 4):
        assert lines(from_near(ROW, card)) != lines(from_near(others, card))
    digits = [from_near({"cards": [["red", d]] * 4, "seed": 0}, 1) for d in range(10)]
    assert len({lines(digit) for digit in digits}) == 10


async def test_the_warm_start_has_the_prompts_of_the_loop(config: Config) -> None:
    """Otherwise the model would have to learn their form from rewards."""
    _, engine = await play(config, seeing)
    row = next(row for row in rows(0) if len(row["messages"]) == 4)
    answer = {"role": "assistant", "content": str(digit_of(ROW))}
    messages = [*Eyes(ROW).problem, *looked(ROW, card_of(ROW)), answer]
    written = demonstrate(engine.template, messages, row["tools"])
    assert [written.prompt(turn) for turn in range(2)] == engine.prompts
    read = demonstrate(engine.template, row["messages"], row["tools"])  # images as data URLs
    assert [len(turn.images) for turn in read.turns] == [1, 1]
    assert audit(read).violations == 0


def test_the_hasty_player_can_improve_and_exercises_are_right() -> None:
    made = list(itertools.islice(rows(1), 4000))
    games, which, digits = made[::4], made[1::4], made[3::4]
    looks = sum(len(row["messages"]) == 4 for row in games) / len(games)
    assert 0.3 < looks < 0.5
    assert json.loads(json.dumps(made[:4])) == made[:4]
    for row in which[:50]:
        message = read_parts(row["messages"][0], "a message")
        picture = decode(images_in([message])[0].read(), "a picture")
        asked = COLOURS[row["messages"][0]["content"][0]["text"].split()[-1].strip("?")]
        assert row["messages"][1]["content"] == str(nearest(picture, asked))
    answers = {row["messages"][1]["content"] for row in digits}
    assert answers == {str(digit) for digit in range(10)}


def test_rows_to_train_on_and_others_are_apart() -> None:
    train, held = ({json.dumps(row) for row in Eyes.rows(split)} for split in ("train", "eval"))
    assert (len(train), len(held)) == (4000, 128)
    assert not train & held


def _run(folder: Path, *arguments: str, timeout: float) -> list[dict[str, Any]]:
    done = subprocess.run(
        [
            *(*python(), "-m", "examples.eyes.run", "--build", str(folder), *arguments),
            f"output_dir={folder}",
        ],
        cwd=ROOT,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Held-out games" in done.stdout
    (metrics,) = folder.glob("eyes-seed0*/metrics.jsonl")
    return [json.loads(line) for line in metrics.open()]


@pytest.mark.slow  # the loop alone: the tests above
def test_a_short_run_of_eyes_from_nothing(tmp_path: Path) -> None:
    overrides = ["training.steps=1", "eval.every=1", "sampling.n=4", "rollout.prompts_per_step=8"]
    first, last = _run(tmp_path, "--updates", "40", *overrides, timeout=900)
    assert (first["step"], last["step"], last["trajectories"]) == (0, 1, 32)
    assert last["dropped"] == {}
    assert last["exact_percent"] == 100.0
    assert last["logprob_diff_max"] < 1e-4


@pytest.mark.slow
def test_a_model_learns_to_look(tmp_path: Path) -> None:
    """From the reward of the answer alone: no part of the reward knows of the tool."""
    steps = _run(tmp_path, timeout=3600)
    assert all(step["exact_percent"] == 100.0 for step in steps[1:])
    before, after = steps[0]["accuracy_heldout"], steps[-1]["accuracy_heldout"]
    assert 0.1 < before <= 0.6
    assert after >= 0.9
    assert steps[-1]["env"]["found"] > 0.9
