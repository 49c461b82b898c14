"""Two tenants of one process do not see each other."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from turnwise.internals.torch import default_group_apart
from turnwise.serving.colocated.host import inside, own_state


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def test_each_tenant_draws_its_own_random_numbers() -> None:
    seed(1)
    host = [draw() for _ in range(3)]
    seed(2)
    guests = [draw() for _ in range(3)]

    guest = own_state(threads=1)
    seed(1)
    with inside(guest):
        seed(2)
    drawn: dict[str, list[Any]] = {"host": [], "guest": []}
    for _ in range(3):
        drawn["host"].append(draw())
        with inside(guest):
            drawn["guest"].append(draw())
    assert drawn == {"host": host, "guest": guests}


def test_each_tenant_keeps_its_own_settings() -> None:
    def settings() -> tuple[Any, ...]:
        return (
            torch.get_num_threads(),
            torch.set_num_threads,
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        )

    torch.use_deterministic_algorithms(True)
    try:
        before = settings()
        guest = own_state(threads=1)
        with inside(guest):
            assert settings() == (1, before[1], torch.float32, "highest", False)
            torch.set_num_threads = str
            torch.set_default_dtype(torch.bfloat16)
            torch.set_float32_matmul_precision("medium")
        assert settings() == before
        with inside(guest):
            assert settings() == (1, str, torch.bfloat16, "medium", False)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_failure_inside_still_leaves_the_hosts_state() -> None:
    def fail() -> None:
        with inside(own_state(threads=1)):
            torch.set_default_dtype(torch.float64)
            raise RuntimeError("inside")

    before = torch.get_default_dtype()
    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert torch.get_default_dtype() == before


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_each_tenant_has_its_own_default_group(group: Any) -> None:
    guest = own_state(threads=1)
    with inside(guest):
        assert not dist.is_initialized()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.new_group([0])
        assert dist.group.WORLD is not group
    assert dist.group.WORLD is group
    with inside(guest), default_group_apart():
        assert not dist.is_initialized()
    one = torch.ones(1)
    dist.all_reduce(one)
    assert functional.all_reduce(one, "sum", group).item() == 1  # torch finds it by its name
