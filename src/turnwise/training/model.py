"""The trainer's models: their computation, and their distribution over ranks by FSDP2."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from turnwise.config import Config, OtherModel, SamplingConfig
from turnwise.core.optional import Foreign
from turnwise.core.process import give_back
from turnwise.errors import InputError
from turnwise.training.batching import Columns
from turnwise.training.context import ContextGroup
from turnwise.training.loading import (
    POLICY,
    backbone_of,
    decoder_layers,
    dtype_of,
    learning_dtype,
    load_model,
    load_value_model,
    models_beside,
    path_of,
    recompute,
    shared_roles,
    translate_unreadable,
)
from turnwise.training.lora import ModelName as ModelName
from turnwise.training.lora import add_adapters, take_role, trained_part
from turnwise.training.memory import check_room
from turnwise.training.scoring import Scores, hidden_before, score_columns
from turnwise.training.shards import read_shards, weight_files

_KEY = "engine.routing_replay"
_ROUTER = re.compile(r"top_?k_?router$", re.IGNORECASE)
"""Names of the classes of routers in Transformers."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_NARROW = 256  # most experts whose numbers are one byte each


class RoutingReplay:
    """The routers of a model, which repeat the engine's choice of experts (R3).

    A mixture of experts amplifies rounding: where two experts are almost equally likely, engine and
    trainer may choose differently, and the log-probs of the token differ at once. Here each router
    computes its own probabilities, and takes them at the recorded experts, so that its gradient is
    that of this choice (https://arxiv.org/abs/2510.11370). Tokens without a record are routed as
    ever.
    """

    def __init__(self, model: Foreign) -> None:
        text = model.config.get_text_config()
        self._layers: int = text.num_hidden_layers
        self._recorded: tuple[torch.Tensor, torch.Tensor] | None = None
        """The choices of each token, layer and rank among its experts [N, L, K], and whether the
        token has any [N, 1]."""
        self._experts = self._each = 0
        for name, module in model.named_modules():
            layer = _LAYER.search(f".{name}.")
            if layer is not None and _ROUTER.search(type(module).__name__):
                self._each, self._experts = module.top_k, module.weight.shape[0]
                module.forward = partial(self._route, int(layer[1]), module.forward)
        if not self._experts:
            raise InputError(f"{_KEY}: a {text.model_type} model has no routers that are known")

    def use(self, experts_BTR: torch.Tensor | None) -> None:
        """Set the choices of the next forward and backward pass; None: none are recorded."""
        self._recorded = None
        if experts_BTR is None:
            return
        kind = torch.uint8 if self._experts <= _NARROW else torch.uint16
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
        """Compute one router, with the recorded choice in the place of its own."""
        if self._recorded is None:
            return route(*arguments)
        chosen_NLK, known_N1 = self._recorded
        with _Choice(chosen_NLK[:, layer], known_N1, self._experts) as choice:
            result = route(*arguments)
        if choice.made != 1:
            raise InputError(f"{_KEY}: this model's routers choose in a way that is not known")
        return result


class _Choice(TorchFunctionMode):
    """The recorded experts as the result of a router's top-k over all experts."""

    def __init__(self, chosen_NK: torch.Tensor, known_N1: torch.Tensor, experts: int) -> None:
        super().__init__()
        self.made = 0
        self._chosen_NK, self._known_N1, self._experts = chosen_NK, known_N1, experts

    def __torch_function__(
        self,
        func: Foreign,
        types: Foreign,
        args: Foreign = (),
        kwargs: dict[str, Foreign] | None = None,
    ) -> Foreign:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or args[0].shape[-1] != self._experts:
            return result
        if result.indices.shape != self._chosen_NK.shape:
            return result
        self.made += 1
        indices_NK = torch.where(self._known_N1, self._chosen_NK, result.indices)
        return torch.return_types.topk((args[0].gather(-1, indices_NK), indices_NK))


class Scorer(nn.Module):
    """A causal language model whose forward pass scores tokens, in `dtype`.

    It plays its only role, or several (LoRA) with an adapter each. In the role of the policy, its
    routers repeat the engine's choices if there is a `replay`.
    """

    def __init__(
        self,
        model: Any,
        sampling: SamplingConfig,
        dtype: torch.dtype,
        roles: Sequence[ModelName] = (),
        replay: RoutingReplay | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.roles = roles
        self.head = _value_head(backbone_of(model)) if "value" in roles else None
        self._sampling = sampling
        self._replay = replay

    def forward(
        self, columns: Columns, sampling: SamplingConfig | None = None, role: ModelName = "policy"
    ) -> Scores | torch.Tensor:
        """Return the scores of the targets; in the role of the value model, values."""
        if self.roles:
            take_role(self.model, role)
        if self._replay is not None:
            self._replay.use(columns.experts_BTR if role == "policy" else None)
        if role == "value":
            assert self.head is not None
            return _values_N(backbone_of(self.model), self.head, columns)
        return score_columns(self.model, columns, sampling or self._sampling)


class Critic(nn.Module):
    """PPO's value model: a backbone, and a head that predicts a number for each token.

    The head is that of a reward model, or a new one that predicts 0.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.backbone = backbone_of(model)
        self.dtype = dtype
        self.head = _value_head(self.backbone, getattr(model, "score", None)).to(model.dtype)

    def forward(self, columns: Columns) -> torch.Tensor:
        return _values_N(self.backbone, self.head, columns)


def _value_head(backbone: PreTrainedModel, trained: nn.Linear | None = None) -> nn.Linear:
    head = nn.Linear(backbone.config.get_text_config().hidden_size, 1, bias=False)
    with torch.no_grad():
        if trained is None:
            head.weight.zero_()
        else:
            head.weight.copy_(trained.weight)
    return head


def _values_N(backbone: PreTrainedModel, head: nn.Linear, columns: Columns) -> torch.Tensor:
    values_N: torch.Tensor = head(hidden_before(backbone, columns))[:, 0].float()
    return columns.whole(values_N)


_Module = TypeVar("_Module", Scorer, Critic)


@dataclass(frozen=True, slots=True)
class Models:
    """The models that one rank computes with, on its device and sharded over all ranks."""

    policy: Scorer
    reference: Scorer | None
    """Frozen model of the KL penalty: the policy itself if an adapter can be left out; None if
    nothing needs it."""
    value: Critic | Scorer | None
    """Value model: the policy itself if it has an adapter for it; None if the advantages need
    none."""
    device: torch.device
    group: ContextGroup | None = None
    """Ranks that share each sequence; None: each rank computes its own."""

    def score(
        self, name: ModelName, columns: Columns, sampling: SamplingConfig | None = None
    ) -> Scores:
        """Return the scores of targets by the policy or the reference model; by default under the
        configuration's `sampling`."""
        module = self.policy if name == "policy" else self.reference
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

    def trained(self, role: ModelName) -> nn.Module | None:
        """Return the module whose parameters learn in a role; None if there is no such model."""
        module = self.policy if role == "policy" else self.value
        if isinstance(module, Scorer) and module.roles:
            return trained_part(module, role)
        return module

    @contextmanager
    def computing(self, module: Scorer | Critic) -> Iterator[None]:
        """Compute with one of the models in its precision, for a `with` block."""
        # FSDP itself computes in the module's dtype.
        lower = not isinstance(module, FSDPModule) and any(
            parameter.dtype != module.dtype for parameter in module.parameters()
        )
        with torch.autocast(self.device.type, dtype=module.dtype, enabled=lower):
            yield
        if isinstance(module, FSDPModule) and not torch.is_grad_enabled():
            module.reshard()  # a backward pass would have done it

    def modules(self) -> list[Scorer | Critic]:
        """Return the modules that play these roles, each once."""
        roles = (self.policy, self.reference, self.value)
        return list({id(module): module for module in roles if module is not None}.values())

    def weights(self) -> Iterator[torch.Tensor]:
        for module in self.modules():
            yield from module.parameters()
            yield from module.buffers()


def load_models(
    config: Config, device: torch.device, ranks: int, group: ContextGroup | None = None
) -> Models:
    """Load the policy and the models that are needed beside it, and distribute them."""
    if config.training.attention == "flex_attention" and device.type == "cpu":
        raise InputError("training.attention: flex_attention has no gradients on a CPU: set auto")
    beside = models_beside(config)
    check_room(config, device, ranks, beside)
    roles = shared_roles(config, beside)
    # A frozen backbone needs no more precision than its forward passes.
    model = load_model(config, dtype=dtype_of(config) if roles else learning_dtype(config))
    if roles:
        add_adapters(model, config.model.lora, roles)
    replay = RoutingReplay(model) if config.engine.routing_replay else None
    scorer = Scorer(model, config.sampling, dtype_of(config), roles, replay)
    policy = distribute(scorer, config, device, POLICY)
    reference = policy if "reference" in roles else None
    if reference is None and (other := beside.get("reference")) is not None:
        model = load_model(config, other, learning_dtype(config, other))  # as the policy's
        frozen = Scorer(model, config.sampling, dtype_of(config, other))
        frozen = frozen.requires_grad_(False)
        reference = distribute(frozen, config, device, other, trained=False)
    value: Critic | Scorer | None = policy if "value" in roles else None
    if value is None and (other := beside.get("value")) is not None:
        critic = Critic(load_value_model(config, other), dtype_of(config, other))
        value = distribute(critic, config, device, other)
    give_back()
    return Models(policy, reference, value, device, group)


def distribute(
    module: _Module,
    config: Config,
    device: torch.device,
    other: OtherModel,
    *,
    trained: bool = True,
) -> _Module:
    """Move a module to its device, and shard it if there are several ranks.

    Each decoder layer is gathered only for its own computation. The files of `other`, which the
    module was made of, hold the weights that it still lacks.
    """
    if trained:
        recompute(module, config.training.activation_checkpointing)
    if not dist.is_initialized():
        return module.to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy()
    if module.dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=module.dtype, reduce_dtype=torch.float32)
    for layer in (*decoder_layers(module), module):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    path = path_of(config, other)
    with translate_unreadable(path):
        if any(parameter.is_meta for parameter in module.parameters()):
            read_shards(module, weight_files(path), device)
    return module.to(device)
