"""Optimizers other than AdamW: what they train, for any number of ranks, and how they go on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.loading import in_processes
from tests.training.test_rank import make_policy, model_of, samples_for, train, weights
from turnwise.config import Config, TrainingConfig, parse_config
from turnwise.config.resume import check_unchanged
from turnwise.errors import InputError
from turnwise.training import checkpoint
from turnwise.training.checkpoint_state import load_state, save_state
from turnwise.training.optimizer import (
    MuonAndAdamW,
    TrainableModule,
    make_optimizer,
    matrices_of,
    plain_tensors,
)
from turnwise.training.rank import TrainerRank

__all__ = ["make_policy"]

MakePolicy = Callable[..., TrainerRank]
LORA = {"rank": 4, "target_modules": "all-linear"}


def small(kind: str, ranks: int = 1) -> TrainableModule:
    """An embedding, three layers and their optimizer, sharded over the ranks."""
    torch.manual_seed(0)
    rows = 66 if kind == "adamw_8bit" else 65
    module = nn.Sequential(
        *(nn.Embedding(16, 64), nn.Linear(64, 128), nn.Linear(128, rows, bias=False)),
        nn.Linear(rows, 4),
    )
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in module:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
    # Without clipping: the norm of a gradient is a sum, whose rounding depends on the shards.
    options = {"optimizer": kind, "weight_decay": 0.1, "max_grad_norm": 1e9}
    training = TrainingConfig.model_validate(options)
    return TrainableModule(module, training, 1e-2, None)


def step(learner: TrainableModule, number: int) -> None:
    torch.manual_seed(100 + number)
    learner.module(torch.randint(16, (8,))).square().sum().backward()
    learner.step()


def whole(learner: TrainableModule) -> list[torch.Tensor]:
    found = (parameter.detach() for parameter in learner.module.parameters())
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in found]


def goes_on(kind: str, ranks: int, rank: int, folder: Path) -> list[torch.Tensor]:
    """Take three steps, save, and three more, also from what was saved; return the weights."""
    one, two = small(kind, ranks), small(kind, ranks)
    for number in range(3):
        step(one, number)
    save_state(folder, rank, {"policy": one}, {})
    load_state(folder, rank, {"policy": two})
    for learner in (one, two):
        for number in range(3, 6):
            step(learner, number)
    assert all(map(torch.equal, whole(one), whole(two)))
    for mine, theirs in zip(one.module.parameters(), two.module.parameters(), strict=True):
        state, resumed = one.optimizer.state[mine], two.optimizer.state[theirs]
        assert list(state) == list(resumed)
        for key, value in state.items():
            assert all(map(torch.equal, plain_tensors(value), plain_tensors(resumed[key])))
    return whole(one)


def as_rank(number: int, kind: str, folder: Path, reply: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "meeting"), 2)
    dist.init_process_group("gloo", store=store, rank=number, world_size=2)
    reply.send([tensor.numpy() for tensor in goes_on(kind, 2, number, folder / "two")])
    dist.destroy_process_group()


def test_a_step_of_muon_has_the_size_of_one_of_adamw() -> None:
    torch.manual_seed(0)
    for shape in ((64, 64), (16, 256)):
        weight = nn.Parameter(torch.zeros(shape))
        weight.grad = torch.randn(shape)
        matrices = [{"params": [weight], "weight_decay": 0.0}]
        MuonAndAdamW(matrices, [], 1.0, (0.9, 0.95)).step()
        assert 0.1 < float(weight.detach().square().mean().sqrt()) < 0.3


def test_matrices_of_the_layers_have_muon_and_all_others_adamw(make_policy: MakePolicy) -> None:
    policy = make_policy({"advantage": {"name": "gae"}}, optimizer="muon", weight_decay=0.1)
    for name in ("policy", "critic"):
        learner = policy._learners[name]
        chosen = matrices_of(learner.module)
        named = dict(learner.module.named_parameters())
        matrices = {n for n, p in named.items() if id(p) in chosen}
        assert matrices == {n for n, p in named.items() if ".layers." in n and p.ndim == 2}, name
        assert 0 < len(matrices) < len(named)
        grouped = [p for group in learner.optimizer.param_groups for p in group["params"]]
        assert sorted(map(id, grouped)) == sorted(map(id, named.values()))
    train(policy, samples_for(model_of(policy)))
    state, named = (
        policy._learners["policy"].optimizer.state,
        dict(policy._scorer.named_parameters()),
    )
    kept = {n: set(state[p]) for n, p in named.items() if p in state}
    assert {frozenset(keys) for n, keys in kept.items() if ".layers." in n and "proj" in n} == {
        frozenset({"momentum_buffer"})
    }
    assert {frozenset(keys) for n, keys in kept.items() if "norm" in n or "embed" in n} == {
        frozenset({"step", "exp_avg", "exp_avg_sq"})
    }


@pytest.mark.parametrize("algorithm", [{}, {"advantage": {"name": "gae"}}], ids=str)
def test_muon_goes_on_from_its_checkpoint_bit_for_bit(
    make_policy: MakePolicy, tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    options: dict[str, Any] = {
        **{"optimizer": "muon", "lr_schedule": "cosine", "steps": 9, "warmup_steps": 2},
        **{"updates_per_step": 2, "weight_decay": 0.1},
    }
    one = make_policy(algorithm, **options)
    batch = samples_for(model_of(one))
    train(one, batch)
    folder = tmp_path / "step-0001"
    one.save(checkpoint.begin(folder))
    checkpoint.commit(folder)
    two = make_policy(algorithm, **options)
    assert two.load(folder) == one.version == 2
    rates = [train(policy, batch)["learning_rate"] for policy in (one, two)]
    assert rates[0] == rates[1]
    assert torch.equal(weights(one), weights(two))
    for mine, theirs in zip(one._scorer.parameters(), two._scorer.parameters(), strict=True):
        state, resumed = (
            p._learners["policy"].optimizer.state[w] for p, w in ((one, mine), (two, theirs))
        )
        assert all(torch.equal(state[key], resumed[key]) for key in state | resumed)


def test_muon_trains_the_matrices_of_an_adapter(make_config: Callable[..., Config]) -> None:
    pytest.importorskip("peft")
    model = {**make_config().model.model_dump(), "lora": LORA}
    training = {"optimizer": "muon", "learning_rate": 1e-2, "threads": 1}
    policy = TrainerRank(make_config(model=model, training=training))
    learner = policy._learners["policy"]
    assert matrices_of(learner.module) == {id(p) for p in learner.module.parameters()}
    before = [parameter.detach().clone() for parameter in learner.module.parameters()]
    for _ in range(2):  # an adapter's first factor has no gradient before the second one moves
        train(policy, samples_for(model_of(policy)))
    moved = [
        not torch.equal(a, b) for a, b in zip(before, learner.module.parameters(), strict=True)
    ]
    assert all(moved)


def test_the_optimizer_cannot_change_when_a_run_is_resumed(
    make_config: Callable[..., Config],
) -> None:
    one = make_config()
    training = one.training.model_copy(update={"optimizer": "muon"})
    two = one.model_copy(update={"training": training})
    with pytest.raises(InputError, match=r"training\.optimizer cannot change from adamw to muon"):
        check_unchanged(one, two)


@pytest.mark.parametrize("name", ["muon", "adamw_8bit"])
def test_weights_in_bfloat16_are_refused(make_config: Callable[..., Config], name: str) -> None:
    tree = make_config().model_dump()
    tree["model"]["dtype"] = "bfloat16"
    tree["training"] |= {"optimizer": name, "weights_dtype": "bfloat16"}
    with pytest.raises(InputError, match=rf"optimizer {name} rounds .*weights_dtype to float32"):
        parse_config(tree)


def test_torchao_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    training = TrainingConfig(optimizer="adamw_8bit")
    with pytest.raises(InputError, match=r"adamw_8bit needs torchao: pip install 'turnwise\[torch"):
        make_optimizer(nn.Linear(2, 2), training, 1.0)


@pytest.mark.slow
def test_muon_matches_and_resumes_across_numbers_of_ranks(
    tmp_path: Path,
) -> None:
    alone = goes_on("muon", 1, 0, tmp_path / "one")
    tasks = [(as_rank, number, "muon", tmp_path) for number in range(2)]
    for sent in in_processes(tasks):
        found = [torch.from_numpy(values) for values in sent[-1]]
        assert all(map(torch.equal, found, alone))
    other = small("muon")
    load_state(tmp_path / "two", 0, {"policy": other})
    for number in range(3, 6):
        step(other, number)
    assert all(map(torch.equal, whole(other), alone))


@pytest.mark.slow
def test_8_bit_moments_resume_exactly_on_the_same_rank_count(
    tmp_path: Path,
) -> None:
    """With torchao; the first step compiles."""
    pytest.importorskip("torchao")
    goes_on("adamw_8bit", 1, 0, tmp_path / "one")
    tasks = [(as_rank, number, "adamw_8bit", tmp_path) for number in range(2)]
    for sent in in_processes(tasks):
        assert len(sent[-1]) == 6
    with pytest.raises(InputError, match=r"those of 2 ranks: set training\.ranks to 2"):
        load_state(tmp_path / "two", 0, {"policy": small("adamw_8bit")})
