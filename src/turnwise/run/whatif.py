"""Other continuations of a stored trajectory, from any of its turns.

Everything before the turn is repeated: the environment, its calls and the stored answers of the
model (`RecordedEngine`). Then an engine answers, and the environment goes on for real. A message
before the turn may be changed. The run's folder is only read.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from rich.text import Text

from turnwise.chat.messages import said
from turnwise.core import logs
from turnwise.core.aio import run_in_thread
from turnwise.core.files import number_of
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError, visible
from turnwise.observe.conversations import read_trajectories, select, trajectory_file
from turnwise.rollouts.agent_loop import RolloutContext
from turnwise.rollouts.loops import load_loop
from turnwise.rollouts.recorded import RecordedEngine
from turnwise.run.bundle import finder
from turnwise.run.display import Display
from turnwise.run.replay import groups_of, open_replay, replay_config
from turnwise.run.runtime import open_runtime
from turnwise.tools.toolbox import Toolbox, ToolResult
from turnwise.training import checkpoint
from turnwise.trajectory import Message, Trajectory

Weights = Literal["then", "now"]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A stored trajectory, and its continuations from a turn on."""

    stored: Trajectory
    turn: int
    message: int
    """Number of the first message that may differ."""
    made: list[Trajectory]
    failures: Mapping[str, str]
    """Message of the first failure, by reason."""
    differences: list[str]
    """Differences of the repeated part from the stored one, if nothing was changed."""

    def shown(self) -> Text:
        """Return the common messages once, then each ending with its reward."""
        text = Text()
        for number, message in enumerate(self.stored.messages[: self.message]):
            text.append(_line(number, message))
        for name, each in [
            ("stored", self.stored),
            *((str(n), t) for n, t in enumerate(self.made)),
        ]:
            reward = "no reward" if each.reward is None else f"reward {each.reward:.3g}"
            text.append(f"\n── {name}: {reward}, {each.status}\n", style="bold")
            for number, message in enumerate(each.messages[self.message :], self.message):
                text.append(_line(number, message))
        lines = [f"{reason}: {why}" for reason, why in self.failures.items()]
        lines += [f"the part before the turn has changed: {how}" for how in self.differences]
        for line in lines:
            text.append(f"\n{visible(line)}\n", style="red")
        return text

    def to_json(self) -> JsonObject:
        trees = [json.loads(each.to_json()) for each in (self.stored, *self.made)]
        return {
            "turn": self.turn,
            "message": self.message,
            "stored": trees[0],
            "continuations": trees[1:],
            "failures": dict(self.failures),
            "differences": self.differences,
        }


async def what_if(
    run: Path,
    problem: str,
    display: Display,
    *,
    step: int | None = None,
    sample: int = 0,
    turn: int | None = None,
    edits: Mapping[int, str] | None = None,
    n: int = 4,
    weights: Weights = "then",
    overrides: Sequence[str] = (),
) -> WhatIf:
    """Sample continuations of a stored trajectory.

    Args:
        problem: The problem's name or number.
        sample: Number of the trajectory in its group.
        turn: The first turn that is sampled; None is the turn after the first changed message,
            or, without changes, the first turn.
        edits: New texts of messages, by their number in the trajectory.
        weights: `then` samples with the weights before the step, which are trained from the run's
            files if no checkpoint has them; `now` with the run's last checkpoint.

    Raises:
        InputError: when there is no such trajectory, turn or message.
    """
    edits = edits or {}
    file = await run_in_thread(lambda: trajectory_file(run, step))
    number = number_of(file)
    groups = groups_of(await run_in_thread(lambda: [*read_trajectories(file)]))
    found = [each for group in groups for each in select(group.trajectories, problem)]
    chosen = [each for each in found if each.sample_index == sample]
    if not chosen:
        known = ", ".join(str(each.sample_index) for each in found) or "none"
        raise InputError(f"{file} has no trajectory {sample} of {problem} (it has: {known})")
    stored = chosen[0]
    turns = turns_of(stored)
    for index in edits:
        if index not in turns:
            raise InputError(f"message {index}: the trajectory has 0 to {len(stored.messages) - 1}")
        if stored.messages[index].get("role") == "assistant" and turns[index] >= 0:
            raise InputError(f"message {index} is the model's: choose --turn {turns[index]}")
    loops = replay_config(run, overrides).loops
    if any(getattr(load_loop(each), "by_requests", False) for each in loops):
        raise InputError("an agent makes its own requests, so that its turns cannot be repeated")
    if turn is None:
        turn = min((max(0, turns[index]) for index in edits), default=0)
    if not 0 <= turn < len(stored.turns):
        raise InputError(f"turn {turn}: the trajectory has 0 to {len(stored.turns) - 1}")
    if late := [index for index in edits if turns[index] > turn]:
        raise InputError(f"message {late[0]} comes after turn {turn}: raise --turn")
    async with AsyncExitStack() as stack:
        temporary = stack.enter_context(TemporaryDirectory(prefix="turnwise-"))
        stack.enter_context(logs.open_logs(Path(temporary), "warning"))
        with display.part("preparing the weights"):
            place = await _weights(run, number, weights, overrides, Path(temporary, "weights"))
        paths = [] if place is None else [f"model.path={place}"]
        config = replay_config(run, [*overrides, *paths])
        config = config.model_copy(update={"output_dir": temporary})
        row = (await run_in_thread(finder, config, run))(stored.problem_id)
        opened = open_runtime(config, row, progress=display)
        runtime = await stack.enter_async_context(opened)
        order = next(i for i, each in enumerate(groups) if stored in each.trajectories)
        # As the run names them, so that a deterministic run samples the same again.
        tag = f"group{(number - 1) * config.rollout.prompts_per_step + order}"
        indices = [sample, *(index for index in range(n) if index != sample)][:n]
        names = {f"{tag}-{row.id}-{index}": stored for index in indices}
        decode, live = runtime.runner.template.decode, runtime.generator
        engine = RecordedEngine(names, decode, turn, live)
        sampling = config.sampling.model_copy(update={"n": 1 + max(indices)})
        change = _changing(stored, turns, edits)
        made = await runtime.runner.run_group(engine, row, sampling, tag, change=change)
    causes = {why: text for why, text in made.causes.items() if "has not stored" not in text}
    differences = [] if edits else [*engine.differences.values()][:1]
    first = next((i for i, own in turns.items() if own >= turn), len(stored.messages))
    return WhatIf(stored, turn, first, made.trajectories, causes, differences)


def read_edits(given: Iterable[str]) -> dict[int, str]:
    """Return changes of messages, each written as N=TEXT, by their number.

    Raises:
        InputError: when one is written otherwise.

    Example:
        >>> read_edits(["2=17"])
        {2: '17'}
    """
    edits: dict[int, str] = {}
    for each in given:
        number, equals, text = each.partition("=")
        if not (equals and number.isdecimal()):
            raise InputError(f"--edit {each}: write the message's number and its text, as in 2=17")
        edits[int(number)] = text
    return edits


def _line(number: int, message: Message) -> str:
    return f"{number:>3} {message.get('role', ''):<10} {visible(said(message))}\n"


def turns_of(stored: Trajectory) -> dict[int, int]:
    """Return, by the number of each message, the first turn that reads it; of the model's own
    messages, the turn that wrote it, which is negative for those of the problem."""
    written = sum(message.get("role") == "assistant" for message in stored.messages)
    turn, turns = len(stored.turns) - written, dict[int, int]()  # a problem may show answers
    for index, message in enumerate(stored.messages):
        turns[index] = turn
        turn += message.get("role") == "assistant"
    return turns


async def _weights(
    run: Path, step: int, weights: Weights, overrides: Sequence[str], target: Path
) -> Path | None:
    """Return the folder of the weights; None is the run's initial model."""
    saved = checkpoint.checkpoints_of(run)
    if weights == "now":
        return (await run_in_thread(checkpoint.newest_whole, saved))[0]
    if step == 1:
        return None
    newest = await run_in_thread(checkpoint.newest_before, saved, step)
    if newest is not None and number_of(newest) == step - 1:
        return newest
    async with open_replay(run, overrides) as (replay, _):
        if why := await replay.begin(step):
            raise InputError(f"the weights before step {step} are gone ({why}): take --weights now")
        return await replay.save(target, step - 1)


def _changing(
    stored: Trajectory, turns: Mapping[int, int], edits: Mapping[int, str]
) -> Callable[[RolloutContext], None]:
    """Return the function that changes messages of the problem, and results of tools."""
    results: dict[int, str] = {}  # by the number of the call
    calls = 0
    called = False
    for index, message in enumerate(stored.messages):
        if message.get("role") == "assistant":
            called = bool(message.get("tool_calls"))
        elif turns[index] > 0 and message.get("role") == "tool" and called:
            if index in edits:
                results[calls] = edits[index]
            calls += 1
        elif turns[index] > 0 and index in edits:
            raise InputError(f"message {index} is neither the problem's nor the result of a tool")

    def change(context: RolloutContext) -> None:
        episode = context.episode
        episode.problem = [
            {**message, "content": edits[index]} if index in edits else message
            for index, message in enumerate(episode.problem)
        ]
        if results:
            episode.toolbox = _EditedToolbox(episode.toolbox, results)

    return change


class _EditedToolbox(Toolbox):
    """Makes all calls, and replaces the results of some."""

    def __init__(self, toolbox: Toolbox, results: Mapping[int, str]) -> None:
        vars(self).update(vars(toolbox))
        self._results = results
        self._called = 0

    async def call(self, name: str, arguments_json: str) -> ToolResult:
        number, self._called = self._called, self._called + 1
        result = await super().call(name, arguments_json)
        edited = self._results.get(number)
        return result if edited is None else ToolResult(edited, "ok")
