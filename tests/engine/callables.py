"""Logits processors as users write them, for `test_logits_processors`."""

import os
import time
from pathlib import Path
from subprocess import run  # noqa: F401 (what a module imports is not what it offers)
from typing import Any

import torch

from turnwise.engine.function_processor import FunctionProcessor

BANNED = 17


def ban(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """No request ever samples `BANNED`."""
    logits[BANNED] = -torch.inf
    return logits


def even(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Only even ids."""
    logits = logits.clone()
    logits[1::2] = -torch.inf
    return logits


def repeat_prompt(prompt: list[int], token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """The prompt's ids again, one after the other."""
    return only(logits, prompt[len(token_ids) % len(prompt)])


def only(logits: torch.Tensor, token: int) -> torch.Tensor:
    kept = torch.full_like(logits, -torch.inf)
    kept[token] = logits[token]
    return kept


class Boosts:
    """Forces every second token as older processors do, in place."""

    forced = False

    def __call__(self, token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        self.forced = len(token_ids) % 2 == 0
        if self.forced:
            logits[9] = logits.max() + 1000.0
        return logits


class Count:
    """Counts from `start`; one object for each request."""

    forced = True

    def __init__(self, start: int = 100, step: int = 1) -> None:
        self.start, self.step, self.calls = start, step, 0

    def __call__(self, token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        assert len(token_ids) == self.calls, "it is called once for each token"
        self.calls += 1
        return only(logits, self.start + self.step * len(token_ids))


def broken(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Fails at its third token."""
    if len(token_ids) == 2:
        raise KeyError("oops")
    return logits


def leaves(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    raise SystemExit(3)


def returns_nothing(token_ids: list[int], logits: torch.Tensor) -> Any:
    logits[0] = 0.0


def nothing_left(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return torch.full_like(logits, -torch.inf)


def computes(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Makes a step as long as one of a large model on a CPU."""
    end = time.monotonic() + 12.0
    while not token_ids and time.monotonic() < end:
        used = time.process_time()
        while time.process_time() < used + 0.01:
            logits = logits + 0.0
        time.sleep(0.015)  # two fifths of a core are enough, and leave tests beside this one some
    return logits


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def calculator(tokenizer: Any) -> FunctionProcessor:
    """Answers `<call>add(1, 2)</call>` inside the answer."""
    return FunctionProcessor(
        tokenizer, {"add": add}, "<call>", "</call>", "<result>", "</result>", timeout=60.0
    )


def writer(tokenizer: Any, path: str) -> FunctionProcessor:
    """Answers `<call>write()</call>` with its process's id, and notes it in a file."""

    def write() -> int:
        with Path(path).open("a") as file:
            file.write(f"{os.getpid()}\n")
        return os.getpid()

    return FunctionProcessor(tokenizer, {"write": write}, "<call>", "</call>", "<r>", "</r>")


class Spells:
    """Spells a word; made with the engine's tokenizer."""

    forced = True

    def __init__(self, word: str, tokenizer: Any) -> None:
        self.ids = tokenizer.encode(word, add_special_tokens=False)

    def __call__(self, token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return only(logits, self.ids[len(token_ids) % len(self.ids)])


class Counter:
    """An extension of vLLM's worker."""

    def count_up(self, by: int = 1) -> int:
        self.counted: int = getattr(self, "counted", 0) + by
        return self.counted

    def break_down(self) -> None:
        raise ValueError("on purpose")


class Clash:
    """An extension with the name of a method of ours."""

    def check_update(self) -> None: ...


NOT_CALLABLE = 3
