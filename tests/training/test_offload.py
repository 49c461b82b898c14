"""What the trainer lends to its engines between steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from tests.training.test_rank import samples_for, train, weights
from turnwise.config import Config
from turnwise.errors import TurnwiseError
from turnwise.training.offload import Offload
from turnwise.training.rank import TrainerRank

MIB = 2**20


def resident() -> int:
    """Bytes of memory that this process alone holds: files that it has read do not count."""
    return int(psutil.Process().memory_full_info().uss)


def test_memory_that_is_lent_is_free_and_comes_back_bit_for_bit(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))  # 64 MiB
    model[3].weight = model[2].weight  # tied: one storage
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    before = [t.clone() for t in (*model.parameters(), *moments)]
    view = model[0].weight[0]
    offload = Offload(
        {
            "params": model.parameters,
            "optimizer": lambda: (t for state in optimizer.state.values() for t in state.values()),
        },
        tmp_path,
    )
    full = resident()
    away = offload.put_away(["params", "optimizer"])
    assert away == pytest.approx(15 * 3 * 4 * MIB, rel=0.01)
    assert full - resident() > 0.9 * away
    assert model[0].weight.shape == (1024, 1024)
    assert offload.put_away(["params"]) == away
    offload.bring_back(["params", "optimizer"])
    offload.bring_back(["params"])
    after = [*model.parameters(), *moments]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert torch.equal(view, before[0][0]), "views see what came back"
    assert list(tmp_path.iterdir()) == []


def test_values_that_cannot_be_written_stay(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    before = model.weight.detach().clone()
    offload = Offload({"params": model.parameters}, tmp_path / "missing")
    with pytest.raises(TurnwiseError, match="the trainer's params cannot be offloaded to"):
        offload.put_away(["params"])
    assert torch.equal(model.weight, before)


def test_what_a_save_that_fails_brought_back_goes_away_again(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    before = model.weight.detach().clone()
    offload = Offload({"params": model.parameters}, tmp_path)
    away = offload.put_away(["params"])

    def save() -> None:
        with offload.brought_back(["params"]):
            assert torch.equal(model.weight, before)
            raise TurnwiseError("the disk is full")

    with pytest.raises(TurnwiseError, match="the disk is full"):
        save()
    assert model.weight.untyped_storage().nbytes() == 0
    assert offload.put_away([]) == away
    offload.bring_back(["params"])
    assert torch.equal(model.weight, before)


def test_values_that_cannot_be_read_are_read_by_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(8, 8)
    before = model.weight.detach().clone()
    offload = Offload({"params": model.parameters}, tmp_path)
    offload.put_away(["params"])

    def broken(*_: Any, **options: Any) -> None:
        raise OSError("input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("torch.frombuffer", broken)
        with pytest.raises(TurnwiseError, match="the trainer's params cannot be read back"):
            offload.bring_back(["params"])
    offload.bring_back(["params"])
    assert torch.equal(model.weight, before)


def test_a_process_that_ends_leaves_no_values_on_the_disk(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    offload = Offload({"params": model.parameters}, tmp_path)
    assert offload.put_away(["params"]) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "algorithm",
    [{"kl": {"coef": 0.01}}, {"advantage": {"name": "gae"}}],
    ids=["reference", "value model"],
)
def test_a_policy_that_lends_its_memory_learns_the_same(
    make_config: Callable[..., Config], tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    def run(name: str, **changes: Any) -> tuple[TrainerRank, list[Any]]:
        training = {"learning_rate": 1e-3, "threads": 1, "colocated": True, **changes}
        (tmp_path / name).mkdir()
        config = make_config(training=training, algorithm=algorithm)
        policy = TrainerRank(config, folder=tmp_path / name)
        samples = samples_for(policy._scorer.get_submodule("model"))
        seen: list[Any] = []
        for _ in range(3):
            policy.offload()
            metrics = train(policy, samples)
            seen.append([metrics["loss"], metrics["grad_norm"], policy.publish().logprobs])
        return policy, seen

    plain, expected = run("plain")
    lent, seen = run("lent", offload=["params", "optimizer"])
    assert seen == expected
    assert torch.equal(weights(plain), weights(lent))
    copies = 2 * 4 + 8 * (1 + ("advantage" in algorithm))
    count = sum(parameter.numel() for parameter in lent._scorer.parameters())
    assert lent.offload() == pytest.approx(count * copies, rel=0.1)
    (tmp_path / "saved").mkdir()
    lent.save(tmp_path / "saved")
    storages = [p.untyped_storage().nbytes() for p in lent._scorer.parameters()]
    assert not any(storages), "engines run while a checkpoint is saved: it lends again"
    assert lent.load(tmp_path / "saved") == 3
    assert torch.equal(weights(plain), weights(lent))
