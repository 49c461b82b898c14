"""Images compared with text of the same length: `python -m benchmarks.images [--quick]`.

A random Qwen2.5-VL of 3.3 M parameters, a tenth of them in the part that reads images. Games have 3
turns of 24 tokens, in groups of 8. The question, and each message after the first two answers, has
a picture of 112 x 112 pixels, which is 16 ids. In the text engine (engine.images_per_prompt 0) it
has as many ids of text. Both engines have the same weights, prompts of the same lengths, and take
turns; every round has new pictures. The trainer takes optimizer steps on the sampled trajectories,
in its default layout. Its memory is the rise of a process's peak above its size before the model
was loaded. The memory of an engine is the peak of its process.
"""

import asyncio
import io
import os
import random
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from PIL import Image

from benchmarks.loading import in_processes, peak_of, resident
from benchmarks.models import as_in_a_worker
from benchmarks.report import Claim, digits, parser, quotients, report
from tests.vision import make_qwen_vl
from turnwise.config import Config, parse_config
from turnwise.core.aio import run as run_loop
from turnwise.core.ray import start_ray
from turnwise.rollouts import Group, Problem, RolloutContext, Runner
from turnwise.rollouts.environment import Environment
from turnwise.run.fleet import make_manager
from turnwise.serving.manager import AsyncLLMServerManager
from turnwise.training.batching import plan_micro_batches
from turnwise.training.rank import TrainerRank
from turnwise.training.samples import make_samples
from turnwise.trajectory import Trajectory
from turnwise.trajectory.audit import audit

KINDS = ("images", "text")
TURNS, NEW_TOKENS, GROUP, SIDE, IDS = 3, 24, 8, 112, 16
CONCURRENCY = 64
BUDGET = 8192
"""Tokens of a micro-batch."""


class Album:
    """A game that shows something new after each answer."""

    def __init__(self, row: dict[str, Any]) -> None:
        self._shown = iter(row["shown"])
        self.problem = [self._next()]

    def _next(self) -> dict[str, Any]:
        shown = next(self._shown)
        image = isinstance(shown, bytes)
        part = {"type": "image", "image": shown} if image else {"type": "text", "text": shown}
        return {"role": "user", "content": [part, {"type": "text", "text": " Which one is it?"}]}

    def step(self, message: dict[str, Any]) -> list[dict[str, Any]] | None:
        try:
            return [self._next()]
        except StopIteration:
            return None

    def reward(self, trajectory: Trajectory) -> float:
        return random.random()


class FixedTurns:
    """The loop of a random model: each answer ends at its maximum length, and the game goes on."""

    async def run(self, environment: Environment, context: RolloutContext) -> None:
        trajectory = context.trajectory
        trajectory.messages = [dict(message) for message in context.problem]
        prompt = await context.first_prompt(trajectory.messages)
        while True:
            completion = await context.sample(prompt)
            assert completion is not None
            text = context.template.decode(completion.token_ids)
            answer = {"role": "assistant", "content": text}
            replies = await context.step(answer)
            trajectory.messages += [answer, *(replies or ())]
            if replies is None:
                break
            prompt = await context.next_prompt(prompt, completion.token_ids, replies)
        trajectory.status = "completed"


def make_problems(count: int, kind: str) -> list[Problem]:
    """Return problems with games that no earlier round had."""

    def shown() -> bytes | str:
        if kind == "text":  # the tokenizer has an id for each digit, and one for the space
            return " ".join(str(random.randrange(10)) for _ in range(1 + IDS // 2))
        buffer = io.BytesIO()
        pixels = np.random.randint(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(buffer, "PNG", compress_level=0)
        return buffer.getvalue()

    return [
        Problem(f"p{random.getrandbits(60):x}", {"shown": [shown() for _ in range(TURNS)]})
        for _ in range(count)
    ]


def configuration(path: Path, kind: str) -> Config:
    return parse_config(
        {
            "environment": "benchmarks.images:Album",
            "model": {"path": str(path), "max_length": 512},
            "data": {"path": "none"},
            "rollout": {"loop": "benchmarks.images:FixedTurns", "concurrency": CONCURRENCY},
            "sampling": {"n": GROUP, "max_tokens": NEW_TOKENS, "ignore_eos": True},
            "training": {"micro_batch_tokens": BUDGET, "learning_rate": 1e-5},
            "engine": {"images_per_prompt": TURNS if kind == "images" else 0},
        }
    )


class Player:
    """One kind of games and the engine that plays them."""

    def __init__(self, config: Config, kind: str, manager: AsyncLLMServerManager) -> None:
        from turnwise.chat.template import load_tokenizer

        self.kind, self._config, self._manager = kind, config, manager
        self._runner = Runner(config, load_tokenizer(config.model))

    async def play(self, games: int) -> tuple[list[Group], float, float]:
        """Play games; returns their groups, the sampled tokens per second and the milliseconds of
        processor time of a game."""
        problems, sampling = make_problems(games // GROUP, self.kind), self._config.sampling
        for engine in self._manager.engines:
            await engine.reset_prefix_cache()
        spent, started = processor_seconds(), time.perf_counter()
        run = self._runner.run_group
        work = (run(self._manager.scheduler, p, sampling, self.kind) for p in problems)
        groups = list(await asyncio.gather(*work))
        seconds, spent = time.perf_counter() - started, processor_seconds() - spent
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        assert len(trajectories) == games, [group.causes for group in groups]
        for trajectory in trajectories:
            found = audit(trajectory)
            assert found.violations == 0, found.first_violation
            assert found.tokens_sampled == TURNS * NEW_TOKENS, found
            images = sum(len(turn.images) for turn in trajectory.turns)
            assert images == (TURNS if self.kind == "images" else 0)
        return groups, games * TURNS * NEW_TOKENS / seconds, 1e3 * spent / games


def processor_seconds() -> float:
    """Return the processor time so far of this process and of all its descendants."""
    here = psutil.Process(os.getpid())
    times = [each.cpu_times() for each in (here, *here.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def engine_processes() -> set[int]:
    started = psutil.Process(os.getpid()).children(recursive=True)
    return {process.pid for process in started if "EngineCor" in process.name()}


def peak_mib(pids: set[int]) -> float:
    lines = [Path(f"/proc/{pid}/status").read_text().splitlines() for pid in pids]
    found = [int(line.split()[1]) for each in lines for line in each if line.startswith("VmHWM")]
    return sum(found) / 1024


def train(config: Config, groups: Sequence[Group], reply: Connection) -> None:
    """Take optimizer steps on the same samples; sends the tokens per second, the bytes of memory
    and the mean length of a sample in tokens."""
    import torch

    torch.set_num_threads(2)
    base = resident("VmRSS")
    samples = make_samples(groups, config, 0).samples
    tokens, rates = sum(sample.length for sample in samples), list[float]()

    def steps() -> None:
        rank = TrainerRank(config)
        for _ in range(3):
            started = time.perf_counter()
            (shares,) = plan_micro_batches(samples, 1, 1, BUDGET, rank.layouts)
            rank.train(shares)
            rates.append(tokens / (time.perf_counter() - started))

    peak = peak_of(steps, base)
    reply.send((max(rates[1:]), peak, tokens / len(samples)))


async def run(configs: dict[str, Config], quick: bool) -> list[Claim]:
    start_ray(None)
    games, rounds = (2 * GROUP, 1) if quick else (96, 5)
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    spent: dict[str, list[float]] = {kind: [] for kind in KINDS}
    memory, groups = dict[str, float](), dict[str, list[Group]]()
    async with (
        make_manager(configs["images"], 0).running() as seeing,
    ):
        of_images = engine_processes()
        async with make_manager(configs["text"], 0).running() as reading:
            of_text = engine_processes() - of_images
            managers = {"images": seeing, "text": reading}
            players = [Player(configs[kind], kind, managers[kind]) for kind in KINDS]
            for number in range(rounds + 1):
                for player in random.sample(players, 2):
                    made, rate, cost = await player.play(games)
                    if number:  # the first round warms up
                        groups[player.kind] = made
                        rates[player.kind].append(rate)
                        spent[player.kind].append(cost)
            memory = {"images": peak_mib(of_images), "text": peak_mib(of_text)}
    ray.shutdown()
    trained: dict[str, list[tuple[float, int, float]]] = {kind: [] for kind in KINDS}
    for _ in range(1 if quick else 3):
        for kind in KINDS:
            ((found,),) = in_processes([(train, configs[kind], groups[kind])])
            trained[kind].append(found)
    steps, peaks, lengths = ([[t[i] for t in trained[k]] for k in KINDS] for i in range(3))
    peaks = [[bytes_ / 2**20 for bytes_ in each] for each in peaks]

    def claim(name: str, unit: str, both: Sequence[list[float]], note: str = "") -> Claim:
        ours, theirs = both
        return Claim(name, unit, ours, "text", theirs, quotients(ours, theirs), note=note)

    length = " and ".join(digits(each[0]) for each in lengths)
    each = f"{SIDE} x {SIDE} pixels, {IDS} ids, {TURNS} a game"
    return [
        claim("rollouts with images", "tokens/s", [rates[k] for k in KINDS], each),
        claim("processor time of such a game", "ms", [spent[k] for k in KINDS]),
        claim("an engine's memory, with images", "MiB", [[memory[k]] for k in KINDS]),
        claim("training with images", "tokens/s", steps, f"mean lengths {length}"),
        claim("the trainer's memory, with images", "MiB", peaks),
    ]


def main() -> None:
    """Run the benchmark and print its claims."""
    options = parser("images", __doc__).parse_args()
    as_in_a_worker()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(make_qwen_vl(Path(folder) / "model", hidden_size=256, layers=4))
        configs = {kind: configuration(path, kind) for kind in KINDS}
        report(run_loop(run(configs, options.quick)), options)


if __name__ == "__main__":
    main()
