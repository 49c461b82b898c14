"""Environments and reward functions of TRL's shape, for tests of what plays them."""

import asyncio
import re
from typing import Any

PROMPT = [{"role": "user", "content": "Go to the goal. "}]
MADE: list["Maze"] = []
CALLS: list[dict[str, Any]] = []
"""Keyword arguments of the reward functions' calls."""


class Maze:
    """An environment of TRL's shape."""

    def __init__(self) -> None:
        MADE.append(self)
        self.rows: list[dict[str, Any]] = []
        self.place = 0

    def reset(self, **row: Any) -> str | None:
        self.rows.append(row)
        self.place = row.get("start", 0)
        if row.get("broken"):
            raise RuntimeError("no maze")
        return f"You are at {self.place}." if "start" in row else None

    def move(self, steps: int) -> dict[str, int]:
        """
        Move.

        Args:
            steps: How far.
        """
        if steps > 10:
            raise ValueError("too far")
        self.place += steps
        return {"place": self.place}

    async def look(self) -> list[dict[str, str]]:
        """Look around."""
        await asyncio.sleep(0)
        return [{"type": "text", "text": "walls "}, {"type": "text", "text": "everywhere"}]

    def get_reward(self) -> float:
        return float(self.place)

    def _hidden(self) -> None:
        raise AssertionError("not a tool")


class Quiet:
    """An environment without a reward of its own."""

    def reset(self, **row: Any) -> None:
        assert "environment" not in row

    async def wait(self) -> None:
        """Wait."""


WORLDS = {"maze": Maze, "quiet": Quiet}


def far(
    prompts: list[Any], completions: list[Any], environments: list[Maze], **kwargs: Any
) -> list[float | None]:
    CALLS.append({"prompts": prompts, "completions": completions, **kwargs})
    kwargs["log_metric"]("places", 2.0)
    kwargs["log_metric"]("places", 4.0)
    kwargs["log_extra"]("place", [environment.place for environment in environments])
    return [float(environment.place > 2) for environment in environments]


async def patient(completions: list[Any], level: list[int], **kwargs: Any) -> list[float | None]:
    await asyncio.sleep(0)
    return [None if level[0] < 2 else 0.5] * len(completions)


def ones(**kwargs: Any) -> list[float]:
    CALLS.append(kwargs)
    return [1.0] * len(kwargs["prompts"])


def odd_metric(completions: list[Any], log_metric: Any, **kwargs: Any) -> list[float]:
    log_metric("share", float("nan"))
    log_metric("count", len(completions))
    return [1.0] * len(completions)


TAGGED = re.compile(r"<think>.*?</think><answer>.*?</answer>", re.DOTALL)


def tagged(completions: list[Any], **kwargs: Any) -> list[float]:
    """Reward the form, as an example of TRL's documentation does."""
    return [float(bool(TAGGED.fullmatch(answer[0]["content"]))) for answer in completions]


def boxed(completions: list[Any], ground_truth: list[str], **kwargs: Any) -> list[float]:
    """Compare with a column of the data."""
    found = [re.search(r"\\boxed\{(.*?)\}", answer[0]["content"]) for answer in completions]
    return [
        float(match is not None and match[1] == truth)
        for match, truth in zip(found, ground_truth, strict=True)
    ]


def for_maths(task: list[str], completions: list[Any], **kwargs: Any) -> list[float | None]:
    """Judge the rows of one task only."""
    return [1.0 if name == "maths" else None for name in task]


async def for_code(task: list[str], completions: list[Any], **kwargs: Any) -> list[float | None]:
    await asyncio.sleep(0)
    return [0.25 if name == "code" else None for name in task]


class Counter:
    """A counter, the environment of TRL's documentation."""

    def reset(self, **kwargs: Any) -> None:
        self.count = 0

    def increment(self, step: int) -> int:
        """
        Increment the counter.

        Args:
            step: The amount to add.

        Returns:
            The new count.
        """
        self.count += step
        return self.count


def counted(environments: list[Counter], **kwargs: Any) -> list[float]:
    return [float(environment.count) for environment in environments]


def few(completions: list[Any], **kwargs: Any) -> list[float]:
    return [1.0]


def not_for_the_first(completions: list[Any], **kwargs: Any) -> list[float | None]:
    return [None, *[1.0] * (len(completions) - 1)]


def log_too_few(completions: list[Any], log_extra: Any, **kwargs: Any) -> list[float]:
    log_extra("column", [1])
    return [1.0] * len(completions)


class Odd(Maze):
    """Its observation is no text."""

    def reset(self, **row: Any) -> Any:
        return 3
