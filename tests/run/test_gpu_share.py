"""Shares of GPUs: which layouts get them, and which are refused."""

from typing import Any

import pytest

from turnwise.config import Config, parse_config
from turnwise.config.gpus import gpu_share
from turnwise.errors import InputError


def layout(workers: int, ranks: int, **sections: Any) -> Config:
    tree = {"environment": "my:Env", "model": {"path": "a"}, "data": {"path": "rows.jsonl"}}
    training = {"ranks": ranks, **sections.pop("training", {})}
    return parse_config({**tree, "serving": {"workers": workers}, "training": training, **sections})


def test_each_has_a_gpu_of_its_own_where_there_are_enough() -> None:
    assert gpu_share(layout(4, 4), 8, training=True) == 1
    assert gpu_share(layout(8, 8, training={"colocated": True}), 8, training=True) == 1
    assert gpu_share(layout(2, 2), 0, training=True) == 0


def test_an_engine_and_a_rank_share_one_gpu() -> None:
    assert gpu_share(layout(1, 1), 1, training=True) == 0.5
    assert gpu_share(layout(3, 4), 2, training=False) == pytest.approx(2 / 3)


def test_the_engines_of_a_teacher_take_their_share_in_training() -> None:
    taught = layout(1, 1, algorithm={"teacher": {"model": "t", "engines": 2}})
    assert gpu_share(taught, 2, training=True) == 0.5
    assert gpu_share(taught, 2, training=False) == 1
    assert gpu_share(layout(1, 1, algorithm={"teacher": {"model": "t"}}), 2, training=True) == 1


def test_a_refusal_names_the_teacher_whose_engines_count() -> None:
    teacher = {"model": "t", "engines": 1}
    taught = layout(2, 2, training={"colocated": True}, algorithm={"teacher": teacher})
    said = (
        r"2 GPUs for 3 devices .* 1 of them of algorithm\.teacher: .* algorithm\.teacher\.engines"
    )
    with pytest.raises(InputError, match=said):
        gpu_share(taught, 2, training=True)


@pytest.mark.parametrize(
    ("config", "gpus"),
    [
        (layout(8, 8), 8),
        (layout(1, 2), 2),
        (layout(2, 1, engine={"tensor_parallel_size": 2}), 4),
        (layout(2, 2, training={"colocated": True}), 1),
    ],
)
def test_what_computes_together_shares_no_gpu(config: Config, gpus: int) -> None:
    """NCCL refuses two processes on one GPU, and vLLM two shards."""
    with pytest.raises(InputError, match=f"there are {gpus} GPUs for .* need a GPU each"):
        gpu_share(config, gpus, training=True)
