"""The whole objective against TRL's own `_compute_loss`, and against the papers' formulas.

Twelve trajectories in three groups, one of them without signal, with tool results between their
turns, tokens of two weight versions, and an engine, a trainer and a reference model that disagree.
Ours goes the way of training: groups to samples, samples to micro-batches, the sum of their
objectives. Theirs are tables of all tokens. Values and gradients are compared.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from turnwise.config import Config, parse_config
from turnwise.config.algorithm import AlgorithmConfig, Gae
from turnwise.rollouts import Group
from turnwise.training.algorithms import Tokens, make_loss
from turnwise.training.algorithms.advantages import GaeAdvantage, moments, normalised
from turnwise.training.algorithms.correction import bounds_of
from turnwise.training.algorithms.entropy import entropy_floor, mean_part
from turnwise.training.algorithms.losses import kl_N, objective, reward_penalty
from turnwise.training.batching import MicroBatch, RankBatches, make_micro_batch, plan_micro_batches
from turnwise.training.sample import Sample
from turnwise.training.samples import make_samples
from turnwise.trajectory import Trajectory

PROMPT = 3
REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.3, 0.9, -0.4, 0.1], [1.0, 1.0, 1.0, 1.0]]
TURNS = [
    (1, 5),
    (4, 2),
    (3, 3),
    (6, 0),
    (2, 7),
    (5, 5),
    (1, 1),
    (7, 2),
    (3, 0),
    (2, 4),
    (6, 6),
    (4, 1),
]
"""Tokens that each trajectory sampled in its first turn and in its second, if it has one."""
TOOL = 2
"""Tokens between them."""
LENGTH = PROMPT + max(a + TOOL + b for a, b in TURNS)
CONSTANT = 32

LOSSES: dict[str, dict[str, Any]] = {
    "ppo_clip": {"name": "ppo_clip"},
    "dual_clip": {"name": "ppo_clip", "dual_clip": 1.5},
    "gspo": {"name": "gspo", "clip_low": 0.1, "clip_high": 0.15},
    "cispo": {"name": "cispo", "clip_high": 0.28},
}
REDUCTIONS = ["token_mean", "sequence_mean", "constant"]
KLS: dict[str, dict[str, Any]] = {
    "no_kl": {},
    "k2_loss": {"coef": 0.2, "estimator": "k2"},
    "k3_loss": {"coef": 0.2},
    "k3_weighted": {"coef": 0.2, "importance_weight": True},
    "k1_reward": {"coef": 0.2, "estimator": "k1", "where": "reward"},
}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "uncorrected": {},
    "token_tis": {"name": "token_tis", "high": 1.5},
    "sequence_tis": {"name": "sequence_tis", "high": 1.5},
    "mask": {"name": "mask", "low": 0.7, "high": 1.4},
    "stale_tis": {"name": "token_tis", "high": 1.5, "stale_only": True},
    "token_mask": {"name": "token_mask", "low": 0.7, "high": 1.4},
    "sequence_mask": {"name": "sequence_mask", "low": 0.5, "high": 1.6},
    "geometric_mask": {"name": "geometric_mask", "low": 0.95, "high": 1.05},
}
ADVANTAGES: list[dict[str, Any]] = [
    {"name": "grpo"},
    {"name": "dr_grpo"},
    {"name": "rloo"},
    {"name": "reinforce_pp", "baseline": "none"},
    {"name": "reinforce_pp", "baseline": "group"},
]
OTHER_LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "sapo": ("sapo", {"loss": {"name": "sapo"}, "reduction": "sequence_mean"}),
    "vespo": ("vespo", {"loss": {"name": "vespo"}}),
    "luspo": ("luspo", {"loss": LOSSES["gspo"], "reduction": "sequence_sum"}),
    "summed": ("luspo", {"loss": LOSSES["ppo_clip"], "reduction": "sequence_sum"}),
    "dual_gspo": (
        "grpo",
        {"loss": {**LOSSES["gspo"], "dual_clip": 1.3}, "reduction": "sequence_mean"},
    ),
    "low_cispo": ("cispo", {"loss": {"name": "cispo", "clip_high": -0.3}}),
    "cispo_of_sequences": (
        "cispo",
        {"loss": {"name": "cispo", "level": "sequence", "clip_high": 0.05}},
    ),
    "sapo_of_sequences": (
        "sapo",
        {"loss": {"name": "sapo", "level": "sequence"}, "reduction": "sequence_mean"},
    ),
}
"""TRL's loss type of each, and our keys."""
VESPO = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
TERMS: dict[str, dict[str, Any]] = {
    "off_policy_mask": {"off_policy_mask_threshold": 0.05},
    "top_entropy": {"entropy": {"top_quantile": 0.3}},
    "bonus": {"entropy": {"coef": 0.4}},
    "all": {
        "off_policy_mask_threshold": 0.05,
        "entropy": {"coef": 0.4, "top_quantile": 0.3},
        "kl": {"coef": 0.2},
    },
}
TRL_LOSS_TYPES = {
    "token_mean": ["dapo", "bnpo"],
    "sequence_mean": ["grpo"],
    "constant": ["dr_grpo"],
}

Table = torch.Tensor


@dataclass
class Tables:
    """Values of all tokens, [12, LENGTH] in float64; `mask` is 1 on sampled ones."""

    groups: list[Group]
    mask: Table
    stale: Table
    logprobs: Table
    old: Table
    engine: Table
    reference: Table
    values: Table
    entropies: Table


@pytest.fixture(scope="module")
def tables() -> Tables:
    random = torch.Generator().manual_seed(7)

    def normal() -> Table:
        return torch.randn(len(TURNS), LENGTH, generator=random).double()

    logprobs = -1.0 - normal().abs()
    # As samples hold them, in single precision.
    engine = (logprobs - 0.3 * normal()).clamp(max=-0.01).float().double()
    mask, stale = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
    groups = [Group(f"p{number}") for number in range(len(REWARDS))]
    for row, (first, second) in enumerate(TURNS):
        made = Trajectory(f"p{row // 4}", row % 4)
        made.set_outcome(reward=REWARDS[row // 4][row % 4])
        ids, start = [100 + row, 1, 2], PROMPT
        for turn, count in enumerate((first, second) if second else (first,)):
            end = start + count
            sampled = list(range(start, end))
            versions = [int(turn == 1 or t > PROMPT + 1) for t in sampled]
            made.add_turn(ids, sampled, engine[row, start:end].tolist(), versions, "stop", None)
            mask[row, start:end] = 1
            stale[row, start:end] = 1 - torch.tensor(versions).double()
            ids, start = [*ids, *sampled, *[9] * TOOL], end + TOOL
        groups[row // 4].trajectories.append(made)
    return Tables(
        groups,
        mask,
        stale,
        logprobs.requires_grad_(),
        logprobs.detach() - 0.2 * normal(),
        engine,
        logprobs.detach() - 0.5 * normal(),
        normal(),
        normal().abs().float().double().requires_grad_(),
    )


@pytest.fixture(scope="module")
def trl_compute_loss() -> Iterator[Callable[..., torch.Tensor]]:
    with pytest.MonkeyPatch.context() as patch:
        # TRL needs vLLM to sample, and nothing is sampled here.
        utils = import_module("trl.import_utils")
        patch.setattr(utils, "is_vllm_available", lambda *_, **__: False)
        from trl.trainer.grpo_trainer import GRPOTrainer

        yield GRPOTrainer._compute_loss


def config_of(**algorithm: Any) -> Config:
    return parse_config(
        {
            "environment": "a:B",
            "model": {"path": "m"},
            "data": {"path": "d"},
            "sampling": {"n": 4, "max_tokens": 16},
            "rollout": {"max_turns": 2},
            "training": {"max_staleness": 1},
            "algorithm": algorithm,
        }
    )


def micro_batches(
    tables: Tables, config: Config
) -> list[tuple[list[Sample], MicroBatch, RankBatches]]:
    made = make_samples(tables.groups, config, 1)
    assert made.report.violations == 0
    ((share,),) = plan_micro_batches(made.samples, 1, 1, 40, "padded")
    assert len(share.micro_batches) > 1
    return [
        (own, make_micro_batch(own, share.trajectory_tokens, 1, False, torch.device("cpu")), share)
        for own in share.micro_batches
    ]


def picked(table: Table, samples: list[Sample]) -> torch.Tensor:
    """The entries of the samples' trained tokens: [N]."""
    parts = []
    for sample in samples:
        row = table[int(sample.token_ids_T[0]) - 100, : sample.length]
        parts.append(row[torch.from_numpy(sample.response_mask_T)])
    return torch.cat(parts)


def spread(
    tables: Tables, batches: list[tuple[list[Sample], MicroBatch, RankBatches]], config: Config
) -> None:
    """From a trajectory's advantages, or rewards, to its tokens', as the policy does it."""
    algorithm = config.algorithm
    for own, batch, _ in batches:
        doubled = batch.tokens.advantages_N.double()
        batch.tokens = replace(batch.tokens, advantages_N=doubled)
        for span in batch.spans():
            if isinstance(algorithm.advantage, Gae):
                rewards_T = torch.zeros_like(batch.tokens.advantages_N[span])
                rewards_T[-1] = batch.tokens.advantages_N[span][-1]
                values_T = picked(tables.values, own)[span]
                estimator = GaeAdvantage(algorithm.advantage)
                advantages_T, _ = estimator.of_tokens(rewards_T, values_T)
                batch.tokens.advantages_N[span] = advantages_T
            elif algorithm.kl.coef and algorithm.kl.where == "reward":
                old_N, reference_N = picked(tables.old, own), picked(tables.reference, own)
                kl_T = kl_N(old_N, reference_N, algorithm.kl.estimator)[span]
                batch.tokens.advantages_N[span] -= reward_penalty(kl_T, algorithm.kl.coef)
    if isinstance(algorithm.advantage, Gae):
        sums_3 = moments(torch.cat([batch.tokens.advantages_N for _, batch, _ in batches]))
        for _, batch, _ in batches:
            scores = normalised(batch.tokens.advantages_N, sums_3)
            batch.tokens = replace(batch.tokens, advantages_N=scores)


def ours(tables: Tables, config: Config) -> torch.Tensor:
    """The sum of the micro-batches' objectives."""
    batches = micro_batches(tables, config)
    spread(tables, batches, config)
    total = torch.zeros((), dtype=torch.float64)
    quantile = config.algorithm.entropy.top_quantile
    everywhere_N = torch.cat([picked(tables.entropies, own) for own, _, _ in batches])
    floor = entropy_floor(everywhere_N.detach(), quantile) if quantile < 1 else -math.inf
    for own, batch, share in batches:
        corrected = config.algorithm.correction.name != "none"
        tokens = Tokens(
            picked(tables.logprobs, own),
            picked(tables.old if corrected else tables.engine, own),
            batch.tokens.engine_logprobs_N.double(),
            batch.tokens.advantages_N,
            batch.tokens.sequence_N,
            batch.tokens.sequences,
            batch.tokens.trajectory_tokens_N,
            batch.tokens.staleness_N,
            picked(tables.reference, own),
        )
        entropy_N = picked(tables.entropies, own)
        low_N = entropy_N.detach() < floor
        mean = mean_part(entropy_N, low_N, int((everywhere_N >= floor).sum()))
        total = (
            total
            + objective(
                config.algorithm,
                make_loss(config.algorithm.loss),
                tokens,
                total_tokens=share.total_tokens,
                total_trajectories=share.total_trajectories,
                constant=config.sampling.max_tokens * config.rollout.max_turns,
                low_entropy_N=low_N,
                bonus=config.algorithm.entropy.coef * mean,
            ).loss
        )
    return total


def papers_advantages(tables: Tables, algorithm: AlgorithmConfig) -> Table:
    """[12, LENGTH], from the formulas of the papers."""
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    others = (rewards.sum(1, keepdim=True) - rewards) / 3
    centred = rewards - rewards.mean(1, keepdim=True)
    match algorithm.advantage.name:
        case "grpo":
            whole = centred / (centred.square().mean(1, keepdim=True).sqrt() + 1e-6)
        case "dr_grpo":
            whole = centred
        case "rloo":
            whole = rewards - others
        case "reinforce_pp":
            baseline = getattr(algorithm.advantage, "baseline", "")
            shifted = centred if baseline == "group" else rewards
            whole = (shifted - shifted.mean()) / (shifted.std(correction=0) + 1e-6)
        case _:
            raise AssertionError(algorithm.advantage)
    advantages = whole.flatten()[:, None].expand(-1, LENGTH)
    if algorithm.kl.coef and algorithm.kl.where == "reward":
        assert algorithm.kl.estimator == "k1"
        kl = (tables.old - tables.reference) * tables.mask
        advantages = advantages - algorithm.kl.coef * kl.flip(1).cumsum(1).flip(1)
    return advantages


def papers_weights(tables: Tables, algorithm: AlgorithmConfig) -> Table:
    """The correction's, [12, LENGTH] or [12, 1] for whole sequences."""
    correction, (low, high) = algorithm.correction, bounds_of(algorithm.correction)
    log_weight = (tables.old - tables.engine) * tables.mask
    match correction.name:
        case "none":
            return torch.ones_like(log_weight)
        case "token_tis":
            weight = log_weight.exp().clamp(max=high)
            return torch.where((tables.stale == 0) & correction.stale_only, 1.0, weight)
        case "sequence_tis":
            return log_weight.sum(1, keepdim=True).exp().clamp(max=high)
        case "geometric_mask":
            lengths = tables.mask.sum(1, keepdim=True)
            mean = (log_weight.sum(1, keepdim=True) / lengths).exp()
            return ((mean >= low) & (mean <= high)).double()
        case "mask" | "token_mask" | "sequence_mask":
            if correction.name == "sequence_mask":
                log_weight = log_weight.sum(1, keepdim=True)
            weight = log_weight.exp()
            inside = (low <= weight) & (weight <= high)
            return inside.double() * (1 if correction.name == "mask" else weight)


def papers_loss(tables: Tables, config: Config) -> torch.Tensor:
    """All of it, written out over tables."""
    algorithm, mask = config.algorithm, tables.mask
    logprobs, reference = tables.logprobs, tables.reference
    old = tables.engine if algorithm.correction.name == "none" else tables.old
    advantages = papers_advantages(tables, algorithm)
    ratio = (logprobs - old).exp()
    loss, token_ratio = algorithm.loss, ratio
    if loss.name == "gspo":
        mean = ((logprobs - old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        ratio = mean.detach().exp() * (logprobs - logprobs.detach()).exp()
    if loss.name == "cispo":
        per_token = -ratio.detach().clamp(max=1 + loss.clip_high) * advantages * logprobs
    else:
        assert loss.name != "dpo"
        clipped = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
        per_token = -torch.minimum(ratio * advantages, clipped * advantages)
        if loss.name == "ppo_clip" and loss.dual_clip:
            most = -loss.dual_clip * advantages
            per_token = torch.where(advantages < 0, torch.minimum(per_token, most), per_token)
    per_token = per_token * papers_weights(tables, algorithm)
    kl, d = algorithm.kl, reference - logprobs
    if kl.coef and kl.where == "loss":
        divergence = d.square() / 2 if kl.estimator == "k2" else d.exp() - d - 1
        corrected = token_ratio * papers_weights(tables, algorithm)
        weight = corrected if kl.importance_weight else 1.0
        per_token = per_token + kl.coef * divergence * weight
    return reduced(per_token, mask, algorithm.reduction)


def reduced(per_token: Table, mask: Table, reduction: str) -> torch.Tensor:
    total = (per_token * mask).sum()
    if reduction == "token_mean":
        return total / mask.sum()
    if reduction == "sequence_mean":
        return ((per_token * mask).sum(1) / mask.sum(1)).mean()
    return total / (len(mask) * CONSTANT)


def trl_losses(
    compute_loss: Callable[..., torch.Tensor], tables: Tables, config: Config
) -> Iterator[torch.Tensor]:
    """TRL's, by each of its loss types that stands for the reduction, where it has the parts.

    It takes advantages and the correction's weights as inputs.
    """
    algorithm = config.algorithm
    loss, kl = algorithm.loss, algorithm.kl
    if kl.coef and kl.where == "loss" and kl.estimator != "k3":
        return
    if loss.name == "gspo" and (
        # One ratio's gradient is spread over its sequence, whatever tokens were weighed by.
        kl.importance_weight
        or kl.where == "reward"
        or algorithm.correction.name in ("token_tis", "mask", "token_mask")
    ):
        return
    if kl.importance_weight and algorithm.correction.name != "none":
        return  # its ratio is that to the trainer's policy, which did not sample
    types = TRL_LOSS_TYPES[algorithm.reduction]
    if loss.name == "cispo":
        types = ["cispo"] if algorithm.reduction == "token_mean" else []
    for loss_type in types:
        yield trl_loss(compute_loss, tables, config, loss_type)


def trl_loss(
    compute_loss: Callable[..., torch.Tensor], tables: Tables, config: Config, loss_type: str
) -> torch.Tensor:
    algorithm, loss, kl = config.algorithm, config.algorithm.loss, config.algorithm.kl
    weights = papers_weights(tables, algorithm)
    completion = slice(PROMPT, None)
    mask = tables.mask[:, completion]
    ids = torch.zeros(len(TURNS), LENGTH, dtype=torch.long)
    lengths = torch.tensor([a + (TOOL + b if b else 0) for a, b in TURNS])
    completion_mask = (torch.arange(LENGTH - PROMPT) < lengths[:, None]).double()
    old = tables.engine if algorithm.correction.name == "none" else tables.old
    advantages = papers_advantages(tables, algorithm)[:, completion]
    inputs = {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": torch.ones(len(TURNS), PROMPT),
        "completion_ids": ids[:, completion],
        "completion_mask": completion_mask,
        "tool_mask": mask,
        "advantages": advantages if kl.where == "reward" else advantages[:, 0],
        "old_per_token_logps": old[:, completion],
        "ref_per_token_logps": tables.reference[:, completion],
        "importance_sampling_ratio": weights if weights.shape[1] == 1 else weights[:, completion],
        "sampling_per_token_logps": tables.engine[:, completion],
        "num_items_in_batch": mask.sum(),
    }
    accelerator = SimpleNamespace(
        num_processes=1,
        gather=lambda x: x,
        reduce=lambda x, reduction: x,
        pad_across_processes=lambda x, dim, pad_index: x,
        sync_gradients=True,
    )
    theirs: Any = compute_loss.__globals__["GRPOTrainer"]  # type: ignore[attr-defined]
    sequences = loss.name == "gspo" or getattr(loss, "level", "token") == "sequence"
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            tables.logprobs[:, completion],
            tables.entropies[:, completion],
            None,
        ),
        accelerator=accelerator,
        args=SimpleNamespace(
            use_bias_correction_kl=kl.importance_weight,
            delta=getattr(loss, "dual_clip", None),
            steps_per_generation=1,
            **{f"sapo_{k}": getattr(loss, k, 1.0) for k in ("temperature_pos", "temperature_neg")},
            **{f"vespo_{key}": getattr(loss, key, 1.0) for key in VESPO},
        ),
        model=SimpleNamespace(training=True),
        loss_type=loss_type,
        epsilon_low=getattr(loss, "clip_low", 0.0),
        epsilon_high=getattr(loss, "clip_high", 0.0) + (loss.name == "cispo"),
        beta=kl.coef if kl.where == "loss" else 0.0,
        importance_sampling_level="sequence" if sequences else "token",
        max_completion_length=CONSTANT,
        current_gradient_accumulation_steps=1,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        off_policy_mask_threshold=algorithm.off_policy_mask_threshold,
        get_off_policy_mask=theirs.get_off_policy_mask,
        top_entropy_quantile=algorithm.entropy.top_quantile,
        get_high_entropy_mask=partial(
            theirs.get_high_entropy_mask, SimpleNamespace(accelerator=accelerator)
        ),
        get_gamma_weights=theirs.get_gamma_weights,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=algorithm.entropy.coef > 0,
        entropy_coef=algorithm.entropy.coef,
        use_adaptive_entropy=False,
        _metrics={"train": defaultdict(list)},
    )
    return compute_loss(trainer, None, inputs)


def assert_same(mine: torch.Tensor, theirs: torch.Tensor, tables: Tables) -> None:
    """Equal but for the single precision of advantages."""
    leaves = (tables.logprobs, tables.entropies)
    gradients = [
        torch.autograd.grad(loss, leaves, materialize_grads=True) for loss in (mine, theirs)
    ]
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    for ours_BT, theirs_BT in zip(*gradients, strict=True):
        torch.testing.assert_close(ours_BT, theirs_BT, rtol=1e-5, atol=1e-8)
    assert gradients[0][0].abs().max() > 1e-3


PAIRS = [
    ([*LOSSES][(i + j) % 4], REDUCTIONS[(i + 2 * j) % 3], kl, correction)
    for (i, kl), (j, correction) in product(enumerate(KLS), enumerate(CORRECTIONS))
]
"""Combinations of the four factors, which contain every pair of two factors' values."""


@pytest.mark.parametrize(("loss", "reduction", "kl", "correction"), PAIRS)
def test_every_loss_reduction_penalty_and_correction(
    tables: Tables,
    loss: str,
    reduction: str,
    kl: str,
    correction: str,
) -> None:
    config = config_of(
        loss=LOSSES[loss], reduction=reduction, kl=KLS[kl], correction=CORRECTIONS[correction]
    )
    assert_same(ours(tables, config), papers_loss(tables, config), tables)


@pytest.mark.parametrize(
    "correction", [{}, CORRECTIONS["token_tis"], {"name": "mask"}], ids=["none", "tis", "mask"]
)
@pytest.mark.parametrize("kl", ["no_kl", "k3_loss"])
@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_losses_that_trl_has_by_a_name_of_their_own(
    tables: Tables,
    trl_compute_loss: Callable[..., torch.Tensor],
    name: str,
    kl: str,
    correction: dict[str, Any],
) -> None:
    loss_type, keys = OTHER_LOSSES[name]
    spread_out = keys["loss"]["name"] == "gspo" or name == "sapo_of_sequences"
    if spread_out and correction:
        return  # one ratio's gradient is spread over its sequence, whatever tokens were weighed by
    config = config_of(**keys, kl=KLS[kl], correction=correction)
    theirs = trl_loss(trl_compute_loss, tables, config, loss_type)
    assert_same(ours(tables, config), theirs, tables)


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_masks_of_tokens_and_the_entropy_bonus(
    tables: Tables, trl_compute_loss: Callable[..., torch.Tensor], term: str, loss_type: str
) -> None:
    """The bonus is that of `entropy_coef`."""
    (reduction,) = (name for name, types in TRL_LOSS_TYPES.items() if loss_type in types)
    config = config_of(reduction=reduction, **TERMS[term])
    theirs = trl_loss(trl_compute_loss, tables, config, loss_type)
    assert_same(ours(tables, config), theirs, tables)
    plain = ours(tables, config_of(reduction=reduction, kl=TERMS[term].get("kl", {})))
    assert abs(float(ours(tables, config) - plain)) > 1e-4


@pytest.mark.parametrize("advantage", ADVANTAGES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_advantage(
    tables: Tables,
    trl_compute_loss: Callable[..., torch.Tensor],
    advantage: dict[str, Any],
    reduction: str,
) -> None:
    config = config_of(advantage=advantage, reduction=reduction)
    for theirs in trl_losses(trl_compute_loss, tables, config):
        assert_same(ours(tables, config), theirs, tables)


def test_the_combinations_have_every_pair_of_values() -> None:
    factors = LOSSES, REDUCTIONS, KLS, CORRECTIONS
    for one, other in combinations(range(4), 2):
        assert {(made[one], made[other]) for made in PAIRS} == {
            *product(factors[one], factors[other])
        }


def test_all_combinations_that_trl_has_too(
    tables: Tables, trl_compute_loss: Callable[..., torch.Tensor]
) -> None:
    compared = Counter[str]()
    for loss, reduction, kl, correction in product(LOSSES, REDUCTIONS, KLS, CORRECTIONS):
        config = config_of(
            loss=LOSSES[loss], reduction=reduction, kl=KLS[kl], correction=CORRECTIONS[correction]
        )
        found = list(trl_losses(trl_compute_loss, tables, config))
        for theirs in found:
            assert_same(ours(tables, config), theirs, tables)
        compared[loss] += bool(found)
    assert compared == {"ppo_clip": 75, "dual_clip": 75, "gspo": 24, "cispo": 25}


def test_generalised_advantages(tables: Tables) -> None:
    """PPO with a critic: A_t as the sum over all later steps that its paper defines."""
    config = config_of(advantage={"name": "gae", "gamma": 0.9, "lam": 0.8})
    rewards = torch.tensor(REWARDS, dtype=torch.float64).flatten()
    advantages = torch.zeros_like(tables.mask)
    for row in range(len(TURNS)):
        places = tables.mask[row].nonzero().flatten().tolist()
        values = [*tables.values[row, places].tolist(), 0.0]
        gains = [0.9 * values[i + 1] - values[i] for i in range(len(places))]
        gains[-1] += float(rewards[row])
        for i, place in enumerate(places):
            advantages[row, place] = sum((0.9 * 0.8) ** k * g for k, g in enumerate(gains[i:]))
    trained = advantages[tables.mask.bool()]
    advantages = (advantages - trained.mean()) / (trained.std(correction=0) + 1e-6)
    ratio = (tables.logprobs - tables.engine).exp()
    clipped = ratio.clamp(0.8, 1.28)
    per_token = -torch.minimum(ratio * advantages, clipped * advantages)
    theirs = reduced(per_token, tables.mask, "token_mean")
    assert_same(ours(tables, config), theirs, tables)


def test_online_dpo(tables: Tables) -> None:
    """The mean over pairs, of the first best and the first worst of each group that has one."""
    config = config_of(loss={"name": "dpo", "beta": 0.3})
    gain = ((tables.logprobs - tables.reference) * tables.mask).sum(1)
    pairs = torch.stack([gain[0] - gain[1], gain[5] - gain[6]])
    theirs = -torch.nn.functional.logsigmoid(0.3 * pairs).mean()
    assert_same(ours(tables, config), theirs, tables)
