"""A Tinker server in this process, without engines: see `bench`."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.tinker.bench import Client, opened
from turnwise.config import Config
from turnwise.tinker.service import TinkerService


@pytest.fixture
def config(make_config: Callable[..., Config], model_path: str) -> Config:
    return make_config(
        model={"path": model_path, "max_length": 64, "lora": {"rank": 8}},
        weights={"lora": "adapter"},
        training={"threads": 1},
    )


@pytest.fixture
async def served(config: Config, tmp_path: Path) -> AsyncIterator[tuple[Client, TinkerService]]:
    async with opened(config, tmp_path) as (client, service):
        yield client, service


@pytest.fixture
def client(served: tuple[Client, TinkerService]) -> Client:
    return served[0]
