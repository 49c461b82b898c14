"""Conversations of a run, as people read them: `turnwise show`, and the end of rollout and eval."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from turnwise.core.files import number_of, numbered
from turnwise.errors import InputError, visible
from turnwise.observe.conversations import Overview, counted
from turnwise.trajectory import Message, Trajectory, read_jsonl

_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "magenta"}
_INDENT = " " * 11
_MOST = 20
"""Trajectories shown at once."""


def trajectory_file(source: Path, step: int | None = None, heldout: bool = False) -> Path:
    """Return the file of a run's trajectories.

    Args:
        source: A run folder, or a file of trajectories, which is returned as it is.
        step: By default, the newest one.
        heldout: Whether those of the evaluation are wanted.

    Raises:
        InputError: when there is none.

    Example:
        >>> trajectory_file(Path("runs/demo"), step=3)
        PosixPath('runs/demo/trajectories/step-0003.jsonl')
    """
    if source.is_file():
        return source
    folder, kind = source / "trajectories", "eval" if heldout else "step"
    found = numbered(folder, kind, ".jsonl")
    if step is not None:
        found = [path for path in found if number_of(path) == step]
    if not found:
        which = "trajectories" if step is None else f"trajectories of step {step}"
        raise InputError(f"{source} has no {'held-out ' if heldout else ''}{which} (in {folder})")
    return found[-1]


def select(
    trajectories: Iterable[Trajectory], problem: str | None = None, pattern: str | None = None
) -> list[Trajectory]:
    """Return the trajectories of a problem, and those in which something was said.

    Args:
        problem: Name of the problem, or its end, such as `17` for `rows:17`; None is any.
        pattern: A regular expression, searched in the text of all messages; None is any.

    Raises:
        InputError: when the pattern is no regular expression.
    """
    try:
        found = re.compile(pattern or "")
    except re.error as error:
        raise InputError(f"--grep {pattern}: not a regular expression: {error}") from error
    return [
        trajectory
        for trajectory in trajectories
        if (problem is None or problem in (trajectory.problem_id, _number(trajectory.problem_id)))
        and (pattern is None or any(map(found.search, _texts(trajectory))))
    ]


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a file.

    Raises:
        InputError: naming the first line that is none.
    """
    line = 1
    try:
        for trajectory in read_jsonl(path):
            yield trajectory
            line += 1
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}, line {line} is no trajectory: {error}") from error


def show(console: Console, overview: Overview) -> None:
    """Print an overview of trajectories, and those of the highest and of the lowest reward.

    Example:
        found = read_trajectories(Path("runs/demo/eval.jsonl"))
        show(Console(), Overview.of(found, best=2))
    """
    for line in overview.lines():
        console.print(visible(line), highlight=False, markup=False, soft_wrap=True)
    for label, chosen in overview.best_and_worst().items():
        for trajectory in chosen:
            console.print(conversation(trajectory, label), soft_wrap=True)


def show_all(console: Console, trajectories: Sequence[Trajectory]) -> None:
    """Print trajectories in their order, at most twenty."""
    if not trajectories:
        console.print("no trajectory matches")
    for trajectory in trajectories[:_MOST]:
        console.print(conversation(trajectory), soft_wrap=True)
    if len(trajectories) > _MOST:
        console.print(f"{len(trajectories) - _MOST:,} more match", highlight=False)


def conversation(trajectory: Trajectory, label: str = "") -> Text:
    """Return a trajectory as people read it: its result, then what was said.

    Control characters are shown as escapes, so that no answer of a model can drive the terminal.

    Args:
        label: Text before the name.
    """
    reward = "no reward" if trajectory.reward is None else f"reward {trajectory.reward:.3g}"
    if len(trajectory.reward_parts) > 1:
        each = (f"{name} {value:.3g}" for name, value in trajectory.reward_parts.items())
        reward += f" ({', '.join(each)})"
    head = [
        f"{trajectory.problem_id} #{trajectory.sample_index}",
        reward,
        trajectory.status,
        f"{counted(len(trajectory.turns), 'turn', 'turns')}, {trajectory.sampled_tokens:,} tokens",
    ]
    title = visible("  ".join(head))
    text = Text(f"── {f'{label}: ' if label else ''}{title}\n", style="bold")
    text.stylize("not bold", 0, 3)
    for message in trajectory.messages:
        role = visible(str(message.get("role")))
        text.append(f"{role:<10} ", style=f"not bold {_STYLES.get(role, 'yellow')}")
        text.append(f"{visible(_said(message)).replace(chr(10), chr(10) + _INDENT)}\n", "not bold")
    reasons = [turn.fork_reason for turn in trajectory.turns if turn.fork_reason]
    if reasons:
        why = visible(", ".join(reasons))
        text.append(f"{len(trajectory.branches())} branches: {why}\n", "yellow")
    return text


def _said(message: Message) -> str:
    """Return a message's text and its calls."""
    content = message.get("content")
    if isinstance(content, list):  # parts of a message
        content = "".join(str(part.get("text") or f"[{part.get('type')}]") for part in content)
    lines = [str(content)] if content else []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        lines.append(f"→ {function.get('name')}({arguments})")
    return "\n".join(lines)


def _texts(trajectory: Trajectory) -> Iterator[str]:
    for message in trajectory.messages:
        yield _said(message)
    for turn in trajectory.turns:
        for message in turn.messages:
            yield _said(message)


def _number(problem_id: str) -> str:
    return problem_id.rpartition(":")[2]
