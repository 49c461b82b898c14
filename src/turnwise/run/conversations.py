"""Conversations of a run, as people read them: `turnwise show`, and the end of rollout and eval."""

import json
import re
import statistics
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from turnwise.core.files import number_of, numbered
from turnwise.errors import InputError
from turnwise.trajectory import Message, Trajectory, read_jsonl

_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "magenta"}
_INDENT = " " * 11
_TOOL = "tool_"
"""Beginning of the events that are outcomes of tool calls."""
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


def summary(trajectories: Sequence[Trajectory]) -> list[str]:
    """Return the rewards, lengths and outcomes of trajectories, in a few lines.

    Example:
        >>> from turnwise.trajectory import Trajectory
        >>> summary([Trajectory("rows:1", reward=1.0, status="completed")])[0]
        '1 trajectory of 1 problem  reward 1.000 (1 to 1)  0.0 turns, 0 tokens'
    """
    if not trajectories:
        return ["no trajectories"]
    rewards = [trajectory.reward or 0.0 for trajectory in trajectories]
    spread = f" ± {statistics.pstdev(rewards):.3f}" if len(rewards) > 1 else ""
    problems = len({trajectory.problem_id for trajectory in trajectories})
    turns = statistics.fmean(len(trajectory.turns) for trajectory in trajectories)
    lengths = [trajectory.sampled_tokens for trajectory in trajectories]
    shortest, longest = min(lengths), max(lengths)
    between = f" ({shortest:,} to {longest:,})" if shortest < longest else ""
    parts: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.reward_parts.items():
            parts.setdefault(name, []).append(value)
    lines = [
        f"{_counted(len(trajectories), 'trajectory', 'trajectories')} of "
        f"{_counted(problems, 'problem', 'problems')}  "
        f"reward {statistics.fmean(rewards):.3f}{spread} ({min(rewards):g} to {max(rewards):g})  "
        f"{turns:.1f} turns, {statistics.fmean(lengths):,.0f} tokens{between}"
    ]
    if spreads := _spreads(trajectories):
        equal = sum(spread == 0 for spread in spreads)
        lines.append(
            f"groups: spread of rewards {statistics.fmean(spreads):.3f} on average, "
            f"{equal:,} of {len(spreads):,} with equal rewards"
        )
    if len(parts) > 1:
        means = (f"{name} {statistics.fmean(values):.3f}" for name, values in sorted(parts.items()))
        lines.append(f"reward parts: {', '.join(means)}")
    ended = Counter(trajectory.status for trajectory in trajectories)
    events = sum((trajectory.events for trajectory in trajectories), Counter[str]())
    forks = Counter(
        turn.fork_reason
        for trajectory in trajectories
        for turn in trajectory.turns
        if turn.fork_reason
    )
    tools = Counter({k[len(_TOOL) :]: n for k, n in events.items() if k.startswith(_TOOL)})
    others = Counter({k: n for k, n in events.items() if not k.startswith(_TOOL)})
    for name, counts in (
        ("ended", ended),
        ("tools", tools),
        ("events", others),
        ("branches", forks),
    ):
        if counts:
            each = ", ".join(f"{reason} {count:,}" for reason, count in counts.most_common())
            lines.append(f"{name}: {each}")
    return lines


def _spreads(trajectories: Sequence[Trajectory]) -> list[float]:
    """Return the standard deviation of the rewards of each group of several trajectories."""
    groups: dict[str, list[float]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.problem_id, []).append(trajectory.reward or 0.0)
    return [statistics.pstdev(rewards) for rewards in groups.values() if len(rewards) > 1]


def show(
    console: Console, trajectories: Sequence[Trajectory], best: int = 1, worst: int = 1
) -> None:
    """Print a summary of trajectories, and those of the highest and of the lowest reward.

    Args:
        best: Number of those with the highest reward.
        worst: Number of those with the lowest.

    Example:
        show(Console(), list(read_trajectories(Path("runs/demo/eval.jsonl"))), best=2)
    """
    for line in summary(trajectories):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for label, chosen in best_and_worst(trajectories, best, worst).items():
        for trajectory in chosen:
            console.print(conversation(trajectory, label), soft_wrap=True)


def best_and_worst(
    trajectories: Sequence[Trajectory], best: int = 1, worst: int = 1
) -> dict[str, list[Trajectory]]:
    """Return the trajectories of the highest and of the lowest reward, none of them twice."""
    ranked = sorted(trajectories, key=lambda trajectory: trajectory.reward or 0.0)
    best = min(best, len(ranked))
    worst = min(worst, len(ranked) - best)
    return {"best": ranked[len(ranked) - best :][::-1], "worst": ranked[:worst]}


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
        f"{_counted(len(trajectory.turns), 'turn', 'turns')}, {trajectory.sampled_tokens:,} tokens",
    ]
    text = Text(f"── {f'{label}: ' if label else ''}{'  '.join(head)}\n", style="bold")
    text.stylize("not bold", 0, 3)
    for message in trajectory.messages:
        role = str(message.get("role"))
        text.append(f"{role:<10} ", style=f"not bold {_STYLES.get(role, 'yellow')}")
        text.append(f"{_visible(_said(message)).replace(chr(10), chr(10) + _INDENT)}\n", "not bold")
    reasons = [turn.fork_reason for turn in trajectory.turns if turn.fork_reason]
    if reasons:
        text.append(f"{len(trajectory.branches())} branches: {', '.join(reasons)}\n", "yellow")
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


def _visible(text: str) -> str:
    """Return text with control characters as escapes, except line breaks and tabs."""
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs")
        else character.encode("unicode_escape").decode()
        for character in text
    )


def _number(problem_id: str) -> str:
    return problem_id.rpartition(":")[2]


def _counted(count: int, one: str, several: str) -> str:
    return f"{count:,} {one if count == 1 else several}"
