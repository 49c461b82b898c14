"""The optimizer of a module, its schedule, and steps that skip gradients that are not finite.

Weights that are kept in bfloat16 have an AdamW of their own. Its steps are computed in float32 and
rounded up or down at random, with a probability that makes the mean of the results the exact
value. Rounding to the nearest bfloat16 value would lose every step that is smaller than half of the
distance between two such values, which is at least 1/512 of a weight. Most steps in RL are smaller.

To add an optimizer: write its class and its case in `make_optimizer`, its bytes in `held_bytes` of
`training/memory.py`, its name in `optimizer` of `config/training.py`, and the names of its moments
in `_MOMENTS` of `training/checkpoint_state.py`.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from turnwise.config import TrainingConfig
from turnwise.core.optional import Foreign, optional
from turnwise.errors import InputError
from turnwise.internals.torch import whole_matrices
from turnwise.training.reports import CONFIGURED, OptimSettings

_ADAM_BETAS = (0.9, 0.95)  # gradients of RL change too fast for torch's second 0.999
_SPARED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names of parameters that do not decay, as in Transformers' trainer."""
PART = 2**22
"""Number of a weight's values that a step of `RoundingAdamW` computes at once."""
PART_BYTES = 26
"""Bytes of temporary memory for each of these values."""
_LOW_BITS = 2**16  # number of possible values of float32's 16 low bits, which bfloat16 lacks


class TrainableModule:
    """A module with its optimizer and schedule.

    The learning rate after warm-up is `rate`. If `total_updates` is known, the learning rate decays
    until then, as `training.lr_schedule` says.
    """

    def __init__(
        self, module: nn.Module, training: TrainingConfig, rate: float, total_updates: int | None
    ) -> None:
        self.module = module
        self.updates = 0
        """Number of optimizer steps taken so far, which is the position in the schedule."""
        self.in_8_bits = training.optimizer == "adamw_8bit"
        """Whether the moments are torchao's 8-bit tensors."""
        self._training = training
        self._rate = rate
        self._total = total_updates
        self.optimizer = make_optimizer(module, training, rate)
        self._set_rate()

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def resume(self, moments: Mapping[str, Mapping[str, torch.Tensor]], updates: int) -> None:
        """Continue after `updates` steps; rates and decay still come from the configuration."""
        self.optimizer.state.clear()
        for name, parameter in self.module.named_parameters():
            if name in moments:
                self.optimizer.state[parameter] = dict(moments[name])
        self.updates = updates
        self._set_rate()

    def step(self, own: OptimSettings = CONFIGURED) -> tuple[float, bool]:
        """Take a step if the gradient's norm is finite; return the norm and if it is finite."""
        limit = self._training.max_grad_norm if own.max_grad_norm is None else own.max_grad_norm
        norm: torch.Tensor = nn.utils.clip_grad_norm_(self.module.parameters(), limit)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        finite = bool(torch.isfinite(norm))
        if finite:
            with self._with(own):
                self.optimizer.step()
            self.updates += 1
            self._set_rate()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm), finite

    @contextmanager
    def _with(self, own: OptimSettings) -> Iterator[None]:
        """Override the optimizer's settings, such as its learning rate, within a `with` block."""
        groups = self.optimizer.param_groups
        before = [dict(group) for group in groups]
        names = {"betas": own.betas, "eps": own.eps}
        for group in groups:
            group.update({name: value for name, value in names.items() if value is not None})
            if own.learning_rate is not None:
                _set(group, own.learning_rate)
            if own.weight_decay is not None and group["decays"]:
                group["weight_decay"] = own.weight_decay
        try:
            yield
        finally:
            for group, kept in zip(groups, before, strict=True):
                group.update(kept)

    def _set_rate(self) -> None:
        """Set the learning rate of the next step, which is a fraction of the configured rate."""
        warmup, total = self._training.warmup_steps, self._total
        fraction = min(1.0, (self.updates + 1) / (warmup + 1))
        if self._training.lr_schedule != "constant" and total is not None:
            # A program's own loop may go on after the last planned update: the rate then stays the
            # same.
            left = min(1.0, max(1, total - self.updates) / max(1, total - warmup))
            if self._training.lr_schedule == "cosine":
                left = (1 - math.cos(math.pi * left)) / 2
            fraction = min(fraction, left)
        for group in self.optimizer.param_groups:
            _set(group, self._rate * fraction)


def _set(group: dict[str, Foreign], rate: float) -> None:
    kept = group["lr"]  # a tensor if torchao's compiled steps read it
    group["lr"] = kept.fill_(rate) if isinstance(kept, torch.Tensor) else rate


def make_optimizer(
    module: nn.Module, training: TrainingConfig, rate: float
) -> torch.optim.Optimizer:
    """Return the optimizer that `training.optimizer` names; raise InputError if it needs torchao,
    and torchao is not installed or cannot compute with the shards."""
    groups = decay_groups(module, training.weight_decay)
    if training.optimizer == "muon":
        chosen = matrices_of(module)
        matrices, others = list[dict[str, Foreign]](), list[dict[str, Foreign]]()
        for group, (parts, by_muon) in product(groups, ((matrices, True), (others, False))):
            if own := [p for p in group["params"] if (id(p) in chosen) is by_muon]:
                parts.append({**group, "params": own})
        return MuonAndAdamW(matrices, others, rate, _ADAM_BETAS)
    kind: Foreign = RoundingAdamW if training.weights_dtype == "bfloat16" else torch.optim.AdamW
    if training.optimizer == "adamw_8bit":
        kind = optional("torchao.optim", "torchao", "training.optimizer adamw_8bit").AdamW8bit
        _check_shards(module)
    more: dict[str, Foreign] = {}
    if kind is torch.optim.AdamW and all(map(_is_whole_on_cpu, module.parameters())):
        more["fused"] = True  # one pass over the weights instead of ten takes a quarter of the time
    optimizer: torch.optim.Optimizer = kind(
        groups, lr=rate, weight_decay=0, betas=_ADAM_BETAS, **more
    )
    return optimizer


def _is_whole_on_cpu(parameter: nn.Parameter) -> bool:
    return parameter.device.type == "cpu" and not isinstance(parameter, DTensor)


def _check_shards(module: nn.Module) -> None:
    """Refuse shards of different sizes, because torch compiles one step for all shards."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and len(parameter) % parameter.device_mesh.size():
            raise InputError(
                f"training.optimizer adamw_8bit: the {len(parameter)} rows of {name} cannot be "
                f"divided over training.ranks {parameter.device_mesh.size()} in equal parts: "
                "choose another number of ranks, or adamw"
            )


def plain_tensors(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield this rank's tensors of a value in an optimizer's state: the value itself, or the codes
    and scales of a torchao value."""
    local = value.to_local() if isinstance(value, DTensor) else value
    parts = getattr(local, "__tensor_flatten__", None)
    yield from [local] if parts is None else [getattr(local, name) for name in parts()[0]]


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Foreign]]:
    """Return an optimizer's groups of parameters: parameters with weight decay, and norms and
    biases, which have no decay."""
    norms = [part for part in module.modules() if isinstance(part, nn.LayerNorm)]
    spared = {id(parameter) for norm in norms for parameter in norm.parameters()}
    groups: dict[float, list[nn.Parameter]] = {weight_decay: [], 0.0: []}
    for name, parameter in module.named_parameters():
        # With adapters, names have slashes in place of dots.
        plain = _SPARED.search(name.replace("/", ".").lower()) or id(parameter) in spared
        groups[0.0 if plain else weight_decay].append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "decays": decay == weight_decay}
        for decay, parameters in groups.items()
        if parameters
    ]


def matrices_of(module: nn.Module) -> set[int]:
    """Return the `id` of each parameter that Muon trains: matrices outside of embeddings and heads.
    AdamW trains experts that are stored as one tensor of three dimensions."""
    parts: list[nn.Module] = [m for m in module.modules() if isinstance(m, nn.Embedding)]
    models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    parts += [head for model in models if (head := model.get_output_embeddings()) is not None]
    spared = {id(parameter) for part in parts for parameter in part.parameters()}
    return {
        id(parameter)
        for name, parameter in module.named_parameters()
        if parameter.ndim == 2
        and id(parameter) not in spared
        and not name.startswith(("head.", "head/"))  # a value model's head
    }


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the parameter groups of matrices and AdamW for all other groups, with one state.

        B_t = 0.95 B_{t-1} + 0.05 g_t            momentum
        O_t = orthogonalised(g_t + 0.95 (B_t - g_t))
        W_t = (1 - rate * decay) W_{t-1} - rate * 0.2 sqrt(max(rows, columns)) O_t

    Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024,
    kellerjordan.github.io/posts/muon). The factor 0.2 sqrt(...) gives steps the size of AdamW's
    steps, so that AdamW's learning rates fit: Liu et al., "Muon is Scalable for LLM Training"
    (arXiv 2502.16982). Both are computed as in `torch.optim.Muon`. As O_t does not depend on the
    size of the momentum, `training.max_grad_norm` changes only the weight of a gradient relative to
    earlier gradients.
    """

    def __init__(
        self,
        matrices: list[dict[str, Foreign]],
        others: list[dict[str, Foreign]],
        rate: float,
        betas: tuple[float, float],
    ) -> None:
        super().__init__([{**group} for group in (*matrices, *others)], {"lr": rate})
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            self._parts.append(torch.optim.Muon(matrices, lr=rate, adjust_lr_fn="match_rms_adamw"))
        if others:
            self._parts.append(torch.optim.AdamW(others, lr=rate, betas=betas))
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "steps follow a backward pass"
        with whole_matrices():
            for part in self._parts:
                part.step()


class RoundingAdamW(torch.optim.AdamW):
    """AdamW without float32 copies of the weights; its moments have the weights' dtype.

    The random bits of each step depend on torch's seed, the rank and the number of the step, so a
    run that resumes from a checkpoint draws the same bits.

    Source: Zamirai et al., "Revisiting BFloat16 Training", arXiv:2010.06192.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "steps follow a backward pass"
        rank = dist.get_rank() if dist.is_initialized() else 0
        generators: dict[torch.device, torch.Generator] = {}
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(weight)
                    state["exp_avg_sq"] = torch.zeros_like(weight)
                state["step"] += 1
                count = int(state["step"])
                if weight.device not in generators:
                    seed = (torch.initial_seed() + 1_000_003 * count + 10_007 * rank) % 2**63
                    generators[weight.device] = torch.Generator(weight.device).manual_seed(seed)
                generator = generators[weight.device]
                gradient = weight.grad.contiguous()
                parts = [  # of this rank's values, to limit the memory that a step needs
                    torch.split((t.to_local() if isinstance(t, DTensor) else t).view(-1), PART)
                    for t in (weight, gradient, state["exp_avg"], state["exp_avg_sq"])
                ]
                for part, slope, mean, square in zip(*parts, strict=True):
                    _step(part, slope, mean, square, group, count, generator)


def _step(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    group: dict[str, Any],
    count: int,
    generator: torch.Generator,
) -> None:
    """Update a part of a weight and its moments in float32, as torch's AdamW does."""
    rate, (first, second) = group["lr"], group["betas"]
    gradient_32 = gradient.float()
    mean_32 = mean.float().lerp_(gradient_32, 1 - first)
    square_32 = square.float().lerp_(gradient_32.square(), 1 - second)
    mean.copy_(mean_32)
    square.copy_(square_32)
    scale_32 = square_32.div(1 - second**count).sqrt_().add_(group["eps"])
    exact = weight.float().mul_(1 - rate * group["weight_decay"])
    exact.addcdiv_(mean_32, scale_32, value=-rate / (1 - first**count))
    weight.copy_(rounded(exact, generator) if weight.dtype == torch.bfloat16 else exact)


def rounded(values: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Round float32 to bfloat16 stochastically, so that the mean of the results is the exact value:
    1.001 becomes 1.0 in 7 of 8 cases, else 1.0078."""
    noise = torch.randint(
        _LOW_BITS, values.shape, generator=generator, device=values.device, dtype=torch.int32
    )
    # A carry out of the low bits moves the value to the next bfloat16 value away from 0.
    bits = noise.add_(values.view(torch.int32)).bitwise_and_(-_LOW_BITS)
    return bits.view(torch.float32).bfloat16()
