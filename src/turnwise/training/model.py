"""The trainer's models: their roles, computation, and distribution over ranks by FSDP2."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PretrainedConfig, PreTrainedModel

from turnwise.config import Config, OtherModel, SamplingConfig
from turnwise.core.process import give_back
from turnwise.errors import InputError
from turnwise.training.batching import MicroBatch
from turnwise.training.context import Columns, ContextGroup
from turnwise.training.layers import backbone_of, decoder_layers, recompute
from turnwise.training.loading import (
    POLICY,
    dtype_of,
    fill,
    learning_dtype,
    load_model,
    load_value_model,
    shared_roles,
)
from turnwise.training.lora import Role, TrainedPart, add_adapters, take_role
from turnwise.training.memory import check_room
from turnwise.training.routing import RoutingReplay
from turnwise.training.scoring import Scores, hidden_before, score_columns

ModelName = Role
"""The models of the trainer."""


class Scorer(nn.Module):
    """A causal language model whose forward pass scores tokens.

    Args:
        roles: Roles that it plays with an adapter each (LoRA); none if it plays its only one.
        group: Ranks that share each sequence; None: each rank computes its own.
        replay: Its routers, where they repeat the engine's choices in the role of the policy.
    """

    def __init__(
        self,
        model: Any,
        sampling: SamplingConfig,
        dtype: torch.dtype,
        roles: Sequence[Role] = (),
        group: ContextGroup | None = None,
        replay: RoutingReplay | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype
        """Data type of forward passes."""
        self.roles = roles
        self._sampling = sampling
        self.group = group
        self._replay = replay
        self.head = _value_head(backbone_of(model)) if "value" in roles else None

    def forward(
        self, batch: MicroBatch, sampling: SamplingConfig | None = None, role: Role = "policy"
    ) -> Scores | torch.Tensor:
        """Return the scores of a batch's masked tokens; in the role of the value model, values."""
        if self.roles:
            take_role(self.model, role)
        columns = _columns(batch, self.group)
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

    def __init__(self, model: Any, dtype: torch.dtype, group: ContextGroup | None = None) -> None:
        super().__init__()
        self.backbone = backbone_of(model)
        self.group = group
        self.dtype = dtype
        """Data type of forward passes."""
        self.head = _value_head(self.backbone, getattr(model, "score", None)).to(model.dtype)

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Return an estimate of the return before each masked token: [N]."""
        return _values_N(self.backbone, self.head, _columns(batch, self.group))


def _value_head(backbone: PreTrainedModel, trained: nn.Linear | None = None) -> nn.Linear:
    head = nn.Linear(backbone.config.get_text_config().hidden_size, 1, bias=False)
    with torch.no_grad():
        if trained is None:
            head.weight.zero_()
        else:
            head.weight.copy_(trained.weight)
    return head


def _columns(batch: MicroBatch, group: ContextGroup | None) -> Columns:
    if batch.prefixes is not None:
        return Columns.shared(batch.prefixes)
    tensors = (batch.token_ids_BT, batch.mask_BT, batch.position_ids_BT)
    return Columns.of(*tensors, group, batch.experts_BTR)


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
    shape: PretrainedConfig
    """The policy's configuration in Transformers."""
    device: torch.device

    def score(
        self, name: ModelName, batch: MicroBatch, sampling: SamplingConfig | None = None
    ) -> Scores:
        """Return the log-probs and entropies of a batch's masked tokens.

        Args:
            name: "policy" or "reference".
            sampling: Distribution to score under; None: that of the configuration.
        """
        module = self.policy if name == "policy" else self.reference
        assert module is not None, f"there is no {name} model"
        with self.computing(module):
            scores: Scores = module(batch, sampling, name)
        return scores

    def estimate(self, batch: MicroBatch) -> torch.Tensor:
        """Return the value model's estimate of the return before each masked token: [N]."""
        assert self.value is not None, "there is no value model"
        with self.computing(self.value):
            shared = isinstance(self.value, Scorer)
            values_N: torch.Tensor = (
                self.value(batch, None, "value") if shared else self.value(batch)
            )
        return values_N

    def trained(self, role: Role) -> nn.Module | None:
        """Return the module whose parameters learn in a role; None if there is no such model."""
        module = self.policy if role == "policy" else self.value
        if isinstance(module, Scorer) and module.roles:
            return TrainedPart(module, role)
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
        """Yield every parameter and buffer of this rank."""
        for module in self.modules():
            yield from module.parameters()
            yield from module.buffers()


def load_models(
    config: Config,
    device: torch.device,
    ranks: int,
    *,
    reference: OtherModel | None,
    value: OtherModel | None,
    group: ContextGroup | None = None,
) -> Models:
    """Load the policy and its companion models, and distribute them.

    Args:
        reference: Model that is frozen beside the policy; None loads none.
        value: Model that the value model starts from; None loads none.
        group: Ranks that share each sequence; None: each rank computes its own.

    Raises:
        InputError: when one cannot be loaded or computed, or all of them do not fit.
    """
    if config.training.attention == "flex_attention" and device.type == "cpu":
        raise InputError("training.attention: flex_attention has no gradients on a CPU: set auto")
    check_room(config, device, ranks, reference, value)
    roles = shared_roles(config, reference, value)
    # A frozen backbone needs no more precision than its forward passes.
    dtype = dtype_of(config, POLICY) if roles else learning_dtype(config, POLICY)
    model = load_model(config, dtype=dtype)
    shape: PretrainedConfig = model.config
    if roles:
        add_adapters(model, config.model.lora, roles)
    replay = RoutingReplay(model) if config.engine.routing_replay else None
    scorer = Scorer(model, config.sampling, dtype_of(config, POLICY), roles, group, replay)
    policy = distribute(scorer, config, device, POLICY)
    frozen = policy if "reference" in roles else None
    if reference is not None and frozen is None:
        frozen = Scorer(
            load_model(config, reference, learning_dtype(config, reference)),  # as the policy's
            config.sampling,
            dtype_of(config, reference),
            group=group,
        )
        frozen = distribute(frozen.requires_grad_(False), config, device, reference, trained=False)
    critic: Critic | Scorer | None = policy if "value" in roles else None
    if value is not None and critic is None:
        critic = Critic(load_value_model(config, value), dtype_of(config, value), group)
        critic = distribute(critic, config, device, value)
    give_back()
    return Models(policy, frozen, critic, shape, device)


def distribute(
    module: _Module,
    config: Config,
    device: torch.device,
    other: OtherModel,
    *,
    trained: bool = True,
) -> _Module:
    """Move a module to its device, and shard it if there are several ranks.

    Each decoder layer is gathered only for its own computation.

    Args:
        other: The model that the module was made of; its files hold the weights that the module
            still lacks.

    Raises:
        InputError: when the files do not hold them.
    """
    if trained:
        recompute(module, config.training.activation_checkpointing)
    if not dist.is_initialized():
        return module.to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy()
    if module.dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=module.dtype, reduce_dtype=torch.float32)
    for layer in decoder_layers(module):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(module, mesh=mesh, mp_policy=precision)
    fill(module, config, device, other)
    return module.to(device)
