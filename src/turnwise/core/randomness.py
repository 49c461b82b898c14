"""Random numbers of processes that are forked from one process: each needs its own states."""

import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial

from turnwise.core.optional import Foreign


def reseed_all() -> None:
    """Seed all random generators that a fork shares with other forks of its server: numpy's,
    torch's, and all generators that modules made when they were imported. Python itself seeds the
    generator of `random` in a fork."""
    for seed in _seeds():
        seed(int.from_bytes(os.urandom(8)) >> 1)


def _seeds() -> Iterator[Callable[[int], object]]:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    seen = set[int]()
    if numpy is not None:
        yield lambda seed: numpy.random.seed(seed % 2**32)
    if torch is not None:
        yield torch.manual_seed
    for module in list(sys.modules.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            if id(value) in seen:
                continue
            if isinstance(value, random.Random):
                seen.add(id(value))
                yield value.seed
            elif numpy is not None and isinstance(value, numpy.random.RandomState):
                seen.add(id(value))
                yield partial(_seed_state, value)
            elif numpy is not None and isinstance(value, numpy.random.Generator):
                seen.add(id(value))
                yield partial(_seed_bits, value.bit_generator)
            elif torch is not None and isinstance(value, torch.Generator):
                seen.add(id(value))
                yield value.manual_seed


def _seed_state(state: Foreign, seed: int) -> None:
    state.seed(seed % 2**32)


def _seed_bits(bits: Foreign, seed: int) -> None:
    bits.state = type(bits)(seed).state
