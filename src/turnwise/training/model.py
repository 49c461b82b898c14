"""The trainer's models: log-probs of given tokens, under the distribution that the engine samples
from, and the value model's estimates.

Temperature, min-p, top-k and top-p are applied as vLLM applies them: a temperature between 0 and
0.01 counts as 0.01, and at temperature 0 (greedy) none of the four is applied to the logits.
Restrictions by `min_tokens` and custom logits processors are not applied; the difference that they
make is visible in `logprob_diff_max`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from turnwise.chat.vision import ModelImages
from turnwise.config import SamplingConfig
from turnwise.core.optional import Foreign
from turnwise.errors import InputError
from turnwise.training.allowed import Allowed
from turnwise.training.attention import attending
from turnwise.training.batching import Columns
from turnwise.training.context import ContextGroup
from turnwise.training.lora import ModelName as ModelName
from turnwise.training.lora import take_role, trained_part
from turnwise.training.vision import seeing, vision_parameters
from turnwise.trajectory import Distribution

_LOWEST_TEMPERATURE = 0.01  # lowest temperature above 0 in vLLM's SamplingParams
CHUNK_ELEMENTS = 2**25
"""Maximum number of logits computed at once: 128 MiB in float32."""
_KEY = "engine.routing_replay"
_ROUTER = re.compile(r"top_?k_?router$", re.IGNORECASE)
"""Names of the classes of routers in Transformers."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class RoutingReplay(TorchFunctionMode):
    """A model's routers, made to repeat the engine's choice of experts (R3).

    If two experts are almost equally likely, rounding decides between them, and a choice that
    differs from the engine's changes log-probs a lot. Each router computes its own probabilities,
    but selects the recorded experts, so that its gradient belongs to the engine's choice
    (https://arxiv.org/abs/2510.11370).
    """

    def __init__(self, model: Foreign) -> None:
        super().__init__()
        text = model.config.get_text_config()
        self._layers: int = text.num_hidden_layers
        self._recorded: tuple[torch.Tensor, torch.Tensor] | None = None
        """The recorded experts of each token and layer in the order of the top-k [N, L, K], and
        whether the engine recorded the token's experts [N, 1]."""
        self._experts = self._each = self._layer = self._made = 0
        for name, module in model.named_modules():
            layer = _LAYER.search(f".{name}.")
            if layer is not None and _ROUTER.search(type(module).__name__):
                self._each, self._experts = module.top_k, module.weight.shape[0]
                module.forward = partial(self._route, int(layer[1]), module.forward)
        if not self._experts:
            raise InputError(f"{_KEY}: the routers of a {text.model_type} model are not known")

    def use(self, experts_BTR: torch.Tensor | None) -> None:
        """Set the experts for the next forward and backward pass; None: routers choose them."""
        self._recorded = None
        if experts_BTR is None:
            return
        kind = torch.uint8 if self._experts <= 256 else torch.uint16
        size = self._layers * self._each * kind.itemsize
        if experts_BTR.shape[-1] != 1 + size:
            raise InputError(
                f"{_KEY}: the engine recorded {experts_BTR.shape[-1] - 1} bytes for each token, "
                f"and {self._layers} layers of the trainer's model have {size}"
            )
        rows_NR = experts_BTR.flatten(0, 1)
        chosen_NC = rows_NR[:, 1:].contiguous().view(kind).long()
        chosen_NLK = chosen_NC.view(-1, self._layers, self._each)
        self._recorded = chosen_NLK, rows_NR[:, :1].bool()

    def _route(self, layer: int, route: Foreign, *arguments: Foreign) -> Foreign:
        """Compute one router's result with the recorded experts in place of its own choice."""
        if self._recorded is None:
            return route(*arguments)
        self._layer, self._made = layer, 0
        with self:
            result = route(*arguments)
        if self._made != 1:
            raise InputError(f"{_KEY}: this model's routers do not choose by one top-k")
        return result

    def __torch_function__(
        self,
        func: Foreign,
        types: Foreign,
        args: Foreign = (),
        kwargs: dict[str, Foreign] | None = None,
    ) -> Foreign:
        """Replace the result of a router's top-k over all experts by the recorded experts."""
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or args[0].shape[-1] != self._experts:
            return result
        assert self._recorded is not None
        chosen_NLK, known_N1 = self._recorded
        chosen_NK = chosen_NLK[:, self._layer]
        if result.indices.shape != chosen_NK.shape:
            return result
        self._made += 1
        indices_NK = torch.where(known_N1, chosen_NK, result.indices)
        return torch.return_types.topk((args[0].gather(-1, indices_NK), indices_NK))


Scores = tuple[torch.Tensor, torch.Tensor]
"""Log-probs of targets, and the entropy in nats of the distribution that each target was drawn
from: [N] each. Entropies have a gradient only if `entropy_gradient` is set."""


class Scorer(nn.Module):
    """A causal language model whose forward pass scores tokens, in `dtype`.

    It plays one role, or several roles with a LoRA adapter for each. In a policy's role, its
    routers repeat the engine's choices if there is a `replay`. Entropies have a gradient if
    `entropy_gradient` is set. Samples with images need `images`, the model's processor.
    """

    def __init__(
        self,
        model: Any,
        sampling: SamplingConfig,
        dtype: torch.dtype,
        roles: Sequence[str] = (),
        replay: RoutingReplay | None = None,
        entropy_gradient: bool = False,
        images: ModelImages | None = None,
    ) -> None:
        super().__init__()
        self.images = images
        self.model = model
        self.dtype = dtype
        self.roles = roles
        self.head = _value_head(backbone_of(model)) if "value" in roles else None
        self._sampling = sampling
        self._replay = replay
        self._entropy_gradient = entropy_gradient

    def forward(
        self, columns: Columns, sampling: SamplingConfig | None = None, role: str = "policy"
    ) -> Scores | torch.Tensor:
        """Return the targets' scores, or their values in the role of the value model.

        If `sampling` is None, each target is scored under the distribution that it was drawn from.
        """
        if self.roles:
            take_role(self.model, role)
        if self._replay is not None:
            sampled = role not in ("reference", "value")
            self._replay.use(columns.experts_BTR if sampled else None)
        if role == "value":
            assert self.head is not None
            return _values_N(backbone_of(self.model), self.head, columns, self.images)
        gradient = self._entropy_gradient and torch.is_grad_enabled()
        if sampling is not None:
            columns = replace(columns, distributions=(), allowed=None)
        sampling = sampling or self._sampling
        return score_columns(self.model, columns, sampling, gradient, self.images)


class Critic(nn.Module):
    """PPO's value model: a backbone, and a head that predicts a number for each token.

    The head is copied from a reward model; without a reward model, the head is new and predicts 0.
    """

    def __init__(self, model: Any, dtype: torch.dtype, images: ModelImages | None = None) -> None:
        super().__init__()
        self.images = images
        self.backbone = backbone_of(model)
        self.dtype = dtype
        self.head = _value_head(self.backbone, getattr(model, "score", None)).to(model.dtype)

    def forward(self, columns: Columns) -> torch.Tensor:
        return _values_N(self.backbone, self.head, columns, self.images)


def _value_head(backbone: PreTrainedModel, trained: nn.Linear | None = None) -> nn.Linear:
    head = nn.Linear(backbone.config.get_text_config().hidden_size, 1, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.zeros(()) if trained is None else trained.weight)
    return head


def _values_N(
    backbone: PreTrainedModel, head: nn.Linear, columns: Columns, images: ModelImages | None
) -> torch.Tensor:
    values_N: torch.Tensor = head(hidden_before(backbone, columns, images))[:, 0].float()
    return columns.whole(values_N)


@dataclass(frozen=True, slots=True)
class Models:
    """The models that one rank computes with, on its device and sharded over all ranks."""

    policy: Scorer
    reference: Scorer | None
    """Frozen model of the KL penalty: the policy's module if the module can compute without its
    adapter; None if nothing needs a reference model."""
    value: Critic | Scorer | None
    """Value model: the policy's module if the module has an adapter for this role; None if the
    advantages need no value model."""
    device: torch.device
    group: ContextGroup | None = None
    """Ranks that share each sequence; None: each rank computes whole sequences."""

    def score(self, name: str, columns: Columns, sampling: SamplingConfig | None = None) -> Scores:
        """Return a model's scores of the targets.

        Args:
            name: A `ModelName`, one of several policies, or PEFT's name of an adapter.
            sampling: Distribution to score all targets under; None: the distribution that each
                target was drawn from.
        """
        module = self.reference if name == "reference" else self.policy
        assert module is not None, f"there is no {name} model"
        with self.computing(module):
            scores: Scores = module(columns, sampling, name)
        return scores

    def estimate(self, columns: Columns) -> torch.Tensor:
        """Return the value model's estimate of the return before each target: [N]."""
        assert self.value is not None, "there is no value model"
        shared = (None, "value") if isinstance(self.value, Scorer) else ()
        with self.computing(self.value):
            values_N: torch.Tensor = self.value(columns, *shared)
        return values_N

    def trained(self, role: str) -> nn.Module | None:
        """Return the module whose parameters are trained in a role, "value" or a policy's name;
        None if there is no such model."""
        module = self.value if role == "value" else self.policy
        if isinstance(module, Scorer) and module.roles:
            return trained_part(module, role)
        return module

    @contextmanager
    def computing(self, module: Scorer | Critic) -> Iterator[None]:
        """Compute in a model's precision inside a `with` block."""
        # FSDP itself computes in the module's dtype.
        lower = not isinstance(module, FSDPModule) and any(
            parameter.dtype != module.dtype for parameter in module.parameters()
        )
        with torch.autocast(self.device.type, dtype=module.dtype, enabled=lower):
            yield
        if isinstance(module, FSDPModule) and not torch.is_grad_enabled():
            module.reshard()  # a backward pass would have resharded it

    @torch.no_grad()
    def move_reference(self, alpha: float) -> None:
        """Move the reference model towards the policy.

            pi_ref = alpha * pi + (1 - alpha) * pi_ref        of the weights

        Gorbatovski et al., "Learn Your Reference Model for Real Good Alignment" (TR-DPO, arXiv
        2404.09656). Each rank moves its own shards.
        """
        assert self.reference is not None, "there is no reference model"
        for pair in zip(self.reference.parameters(), self.policy.parameters(), strict=True):
            own, new = (p.to_local() if isinstance(p, DTensor) else p for p in pair)
            own.lerp_(new.to(own.dtype), alpha)

    def modules(self) -> list[Scorer | Critic]:
        """Return the modules that play these roles, without duplicates."""
        roles = (self.policy, self.reference, self.value)
        return list({id(module): module for module in roles if module is not None}.values())

    def weights(self) -> Iterator[torch.Tensor]:
        for module in self.modules():
            yield from module.parameters()
            yield from module.buffers()


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model below its head, which computes the last hidden states."""
    parts = (model.base_model, *model.children())
    return next((p for p in parts if p is not model and isinstance(p, PreTrainedModel)), model)


def score_columns(
    model: PreTrainedModel,
    columns: Columns,
    sampling: SamplingConfig,
    entropy_gradient: bool = False,
    images: ModelImages | None = None,
) -> Scores:
    """Score the targets of all columns, of which this rank computes its share.

    Targets without a distribution of their own are scored under `sampling`.
    """
    # Padding needs no attention mask, because it is on the right and attention is causal.
    hidden_NH = hidden_before(backbone_of(model), columns, images)
    targets_N, drawn, allowed = columns.targets_N, columns.distributions, columns.allowed
    learns_N = columns.learns_N if torch.is_grad_enabled() else None
    if not drawn and (learns_N is None or learns_N.all()):
        scores = score_hidden(model, hidden_NH, targets_N, sampling, entropy_gradient, allowed)
        return columns.whole(scores[0]), columns.whole(scores[1])
    other_N = torch.ones(len(targets_N), dtype=torch.bool, device=targets_N.device)
    for _, at_K in drawn:
        other_N[at_K] = False
    rest_K = other_N.nonzero()[:, 0]
    parts: list[tuple[SamplingConfig | Distribution, torch.Tensor]] = [*drawn]
    parts += [(sampling, rest_K)] if len(rest_K) else []
    if learns_N is not None:  # skip the head's backward pass if possible: it is much of the work
        parts = [(s, at_K[learns_N[at_K] == own]) for s, at_K in parts for own in (True, False)]
    found = []
    for own, at_K in parts:
        with torch.set_grad_enabled(
            torch.is_grad_enabled() and (learns_N is None or bool(learns_N[at_K].all()))
        ):
            found.append(
                score_hidden(
                    *(model, hidden_NH[at_K], targets_N[at_K], own, entropy_gradient),
                    None if allowed is None else allowed[at_K],
                )
            )
    back_N = torch.cat([at_K for _, at_K in parts]).argsort()
    logprobs, entropies = zip(*found, strict=True)
    return columns.whole(torch.cat(logprobs)[back_N]), columns.whole(torch.cat(entropies)[back_N])


def score_hidden(
    model: PreTrainedModel,
    hidden_NH: torch.Tensor,
    targets_N: torch.Tensor,
    sampling: SamplingConfig | Distribution,
    entropy_gradient: bool = False,
    allowed: Allowed | None = None,
) -> Scores:
    """Score targets from the last hidden states at the positions before them.

    Targets are [N], or [N, K] for K tokens at each position. If `allowed` is given, each target was
    drawn from its allowed ids only. The logits of many targets are computed in chunks, and computed
    again in the backward pass, so that no [B, T, V] tensor exists.
    """
    rows = chunk_rows(model)
    compute: Callable[..., Scores] = _score
    if len(targets_N) > rows and torch.is_grad_enabled():
        compute = partial(checkpoint, _score, use_reentrant=False)
    parts = [slice(start, start + rows) for start in range(0, max(1, len(targets_N)), rows)]
    chunks = [
        compute(
            *(model, hidden_NH[part], targets_N[part], sampling, entropy_gradient),
            None if allowed is None else allowed[part],
        )
        for part in parts
    ]
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def chunk_rows(model: PreTrainedModel) -> int:
    """Return the number of positions whose logits are computed at once."""
    vocabulary: int = model.config.get_text_config().vocab_size
    return max(1, CHUNK_ELEMENTS // vocabulary)


def hidden_before(
    backbone: PreTrainedModel, columns: Columns, images: ModelImages | None = None
) -> torch.Tensor:
    """Return the last hidden states at the positions just before the targets: [N, H]."""
    given: dict[str, Any] = {"input_ids": columns.token_ids_BT, "use_cache": False}
    if columns.position_ids_BT is not None:
        given["position_ids"] = columns.position_ids_BT
    # `seeing` is entered before `attending`, because the part of the model that reads images knows
    # nothing about sequences.
    with seeing(backbone, columns, images) as seen, attending(backbone, columns) as more:
        hidden_BTH = backbone(**given | more | seen).last_hidden_state
    hidden_NH: torch.Tensor = hidden_BTH.flatten(0, 1)[columns.before_N]
    if columns.others_see and not columns.images:  # FSDP needs the same gradients on all ranks
        unused = [p.flatten()[0] for p in vision_parameters(backbone) if p.requires_grad]
        hidden_NH = hidden_NH + 0 * sum(unused)
    return hidden_NH


@dataclass
class _Output(BaseModelOutput):  # type: ignore[misc]
    """A backbone's output with only the last hidden states."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def logits_of(model: PreTrainedModel, hidden_NH: torch.Tensor) -> torch.Tensor:
    """Return a model's logits for last hidden states, in float32: [N, V].

    The model's own forward pass computes them, with these states in place of its backbone's output,
    because each model may scale or cap logits after the head in its own way.
    """
    given: list[bool] = []

    def give(*_: object, **__: object) -> BaseModelOutput:
        given.append(True)
        return _Output(last_hidden_state=hidden_NH[None])

    backbone = backbone_of(model)
    replaced = [backbone]
    if (inner := backbone.get_decoder()) is not backbone:
        replaced.append(inner)  # some models' forward passes call it directly
    before = [module.__dict__.get("forward") for module in replaced]
    for module in replaced:
        module.forward = give
    try:
        ids_1N = torch.zeros(1, len(hidden_NH), dtype=torch.long, device=hidden_NH.device)
        logits_1NV: torch.Tensor = model(input_ids=ids_1N, use_cache=False).logits
    finally:
        for module, own in zip(replaced, before, strict=True):
            if own is None:
                del module.forward
            else:
                module.forward = own
    if not given:
        raise InputError(
            f"a {model.config.model_type} model computes logits in a way that is not known"
        )
    # Not `logits_1NV[0]`: the gradient of an index is a second tensor of this size.
    return logits_1NV.flatten(0, 1).float()


def _score(
    model: PreTrainedModel,
    hidden_NH: torch.Tensor,
    targets_N: torch.Tensor,
    sampling: SamplingConfig | Distribution,
    entropy_gradient: bool,
    allowed: Allowed | None,
) -> Scores:
    targets_NK = targets_N if targets_N.dim() == 2 else targets_N[:, None]
    logits_NV = logits_of(model, hidden_NH)
    if allowed is not None:  # the engine applies a grammar before everything else
        outside_NV = allowed.outside_NV(targets_NK, logits_NV.shape[-1])
        logits_NV = logits_NV.masked_fill(outside_NV, float("-inf"))
    logits_NV = _processed(logits_NV, targets_NK, sampling)
    if entropy_gradient:
        total_N = torch.logsumexp(logits_NV, dim=-1)
        logprobs_NK = logits_NV.gather(-1, targets_NK) - total_N[:, None]
        share_NV, known_NV = (logits_NV - total_N[:, None]).exp_(), logits_NV.clamp(min=-1e9)
        entropy_N = total_N - (share_NV * known_NV).sum(dim=-1)
        return logprobs_NK.reshape(targets_N.shape), entropy_N
    logprobs_NK, total_N = _LogProbs.apply(logits_NV, targets_NK)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        share_NV = (logits_NV - total_N[:, None]).exp_()
        entropy_N = torch.special.entr(share_NV, out=share_NV).sum(dim=-1)
    return logprobs_NK.reshape(targets_N.shape), entropy_N


class _LogProbs(torch.autograd.Function):
    """Log-probs of targets [N, K], and the log-sum-exp of the logits [N].

    The backward pass needs memory for one more tensor of the logits' size; autograd's backward pass
    would need three.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_NV: torch.Tensor, targets_NK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total_N = torch.logsumexp(logits_NV, dim=-1)
        ctx.save_for_backward(logits_NV, targets_NK, total_N)
        ctx.mark_non_differentiable(total_N)
        return logits_NV.gather(-1, targets_NK) - total_N[:, None], total_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits_NV, targets_NK, total_N = ctx.saved_tensors
        gradient_NK = gradients[0]
        all_N1 = gradient_NK.sum(dim=-1, keepdim=True)
        gradient_NV = (logits_NV - total_N[:, None]).exp_().mul_(-all_N1)
        return gradient_NV.scatter_add_(-1, targets_NK, gradient_NK), None


def _processed(
    logits_NV: torch.Tensor, targets_NK: torch.Tensor, sampling: SamplingConfig | Distribution
) -> torch.Tensor:
    """Apply temperature, min-p, top-k and top-p as the engine does."""
    if sampling.temperature == 0.0:
        return logits_NV
    if sampling.temperature != 1.0:
        logits_NV = logits_NV / max(sampling.temperature, _LOWEST_TEMPERATURE)
    few = 0 < sampling.top_k < logits_NV.shape[-1]
    if not few and sampling.top_p >= 1.0 and not sampling.min_p:
        return logits_NV
    dropped_NV = torch.zeros_like(logits_NV, dtype=torch.bool)
    if sampling.min_p:
        probabilities_NV = logits_NV.detach().softmax(dim=-1)
        dropped_NV |= probabilities_NV < probabilities_NV.amax(-1, keepdim=True) * sampling.min_p
    if few:
        lowest_N1 = logits_NV.topk(sampling.top_k, dim=-1).values[:, -1:]
        dropped_NV |= logits_NV < lowest_N1
    if sampling.top_p < 1.0:
        kept_NV = logits_NV.masked_fill(dropped_NV, float("-inf"))
        sorted_NV, order_NV = kept_NV.sort(dim=-1)
        outside_NV = sorted_NV.softmax(dim=-1).cumsum(dim=-1) <= 1 - sampling.top_p
        outside_NV[:, -1] = False
        dropped_NV |= torch.zeros_like(dropped_NV).scatter(-1, order_NV, outside_NV)
    # Keep a target that newer weights would drop, so that its ratio is small but not zero.
    dropped_NV.scatter_(-1, targets_NK, False)
    return logits_NV.masked_fill(dropped_NV, float("-inf"))
