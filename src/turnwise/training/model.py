"""The trainer's models: loaded, checked for memory, sharded over ranks by FSDP2.

Master weights are always float32, since steps with a small learning rate vanish in bfloat16;
forward passes use `model.dtype`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
)

from turnwise.config import Config, OtherModel, SamplingConfig
from turnwise.errors import InputError
from turnwise.training.batching import MicroBatch
from turnwise.training.scoring import Scores, hidden_before, score

_TRAINED_BYTES = 16
"""Bytes of a trained parameter: weight, gradient, and AdamW's two moments, in float32."""
_FROZEN_BYTES = 4
_GIB = 2**30
POLICY = OtherModel()
"""The model of `model.path` itself."""

ModelName = Literal["policy", "reference", "value"]
"""The models of the trainer."""


class Scorer(nn.Module):
    """A causal language model whose forward pass scores tokens."""

    def __init__(self, model: Any, sampling: SamplingConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype
        """Data type of forward passes."""
        self._sampling = sampling

    def forward(self, batch: MicroBatch, sampling: SamplingConfig | None = None) -> Scores:
        return score(
            self.model,
            batch.token_ids_BT,
            batch.mask_BT,
            batch.position_ids_BT,
            sampling or self._sampling,
        )


class Critic(nn.Module):
    """PPO's value model: a backbone, and a head that predicts a number for each token.

    The head is that of a reward model, or a new one that predicts 0.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.backbone = model.base_model
        self.dtype = dtype
        """Data type of forward passes."""
        self.head = nn.Linear(self.backbone.config.hidden_size, 1, bias=False)
        trained = getattr(model, "score", None)
        with torch.no_grad():
            if trained is None:
                self.head.weight.zero_()
            else:
                self.head.weight.copy_(trained.weight)

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Return an estimate of the return before each masked token: [N]."""
        hidden_NH = hidden_before(
            self.backbone, batch.token_ids_BT, batch.mask_BT, batch.position_ids_BT
        )
        values_N: torch.Tensor = self.head(hidden_NH)[:, 0].float()
        return values_N


_Module = TypeVar("_Module", Scorer, Critic)


@dataclass(frozen=True, slots=True)
class Models:
    """The models that one rank computes with, on its device and sharded over all ranks."""

    policy: Scorer
    reference: Scorer | None
    """Frozen model of the KL penalty; None if nothing needs it."""
    value: Critic | None
    """Value model; None if the advantages need none."""
    shape: PretrainedConfig
    """The policy's configuration in Transformers."""
    device: torch.device
    ranks: int

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
        with self._computing(module):
            scores: Scores = module(batch, sampling)
        return scores

    def estimate(self, batch: MicroBatch) -> torch.Tensor:
        """Return the value model's estimate of the return before each masked token: [N]."""
        assert self.value is not None, "there is no value model"
        with self._computing(self.value):
            values_N: torch.Tensor = self.value(batch)
        return values_N

    @contextmanager
    def _computing(self, module: Scorer | Critic) -> Iterator[None]:
        # FSDP itself computes in the module's dtype.
        lower = module.dtype != torch.float32 and self.ranks == 1
        with torch.autocast(self.device.type, dtype=module.dtype, enabled=lower):
            yield
        if isinstance(module, FSDPModule) and not torch.is_grad_enabled():
            module.reshard()  # a backward pass would have done it

    def weights(self) -> Iterator[torch.Tensor]:
        """Yield every parameter and buffer of this rank."""
        for module in (self.policy, self.reference, self.value):
            if module is not None:
                yield from module.parameters()
                yield from module.buffers()


def load_models(
    config: Config,
    device: torch.device,
    ranks: int,
    *,
    reference: OtherModel | None,
    value: OtherModel | None,
) -> Models:
    """Load the policy and its companion models, and distribute them.

    Args:
        reference: Model that is frozen beside the policy; None loads none.
        value: Model that the value model starts from; None loads none.

    Raises:
        InputError: when one cannot be loaded, or all of them do not fit.
    """
    check_room(config, device, ranks, reference, value)
    model = load_model(config)
    shape: PretrainedConfig = model.config
    policy = distribute(Scorer(model, config.sampling, dtype_of(config, POLICY)), config, device)
    frozen: Scorer | None = None
    if reference is not None:
        frozen = Scorer(load_model(config, reference), config.sampling, dtype_of(config, reference))
        frozen = distribute(frozen.requires_grad_(False), config, device, trained=False)
    critic: Critic | None = None
    if value is not None:
        critic = Critic(load_value_model(config, value), dtype_of(config, value))
        critic = distribute(critic, config, device)
    return Models(policy, frozen, critic, shape, device, ranks)


def check_room(
    config: Config,
    device: torch.device,
    ranks: int,
    frozen: OtherModel | None,
    trained: OtherModel | None,
) -> None:
    """Check that a rank has memory for all models and their optimizers; ignores activations.

    Args:
        frozen: The reference model, if any.
        trained: The value model, if any.

    Raises:
        InputError: when they do not fit, or a model does not know all of the policy's tokens.
    """
    count, _ = _size(config, POLICY)
    bytes_needed = count * _TRAINED_BYTES
    for key, other, each in (
        ("algorithm.kl.model", frozen, _FROZEN_BYTES),
        ("algorithm.advantage.model", trained, _TRAINED_BYTES),
    ):
        if other is None:
            continue
        more, words = _size(config, other)
        bytes_needed += more * each
        if other.path and words < (tokens := _tokens(config)):
            raise InputError(
                f"{key}: {other.path} has a vocabulary of {words:,} tokens, and the policy's "
                f"tokenizer has {tokens:,}: both models must have the same tokenizer"
            )
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available // ranks  # CPU ranks may share a machine
    needed = bytes_needed / ranks
    if needed > free:
        raise InputError(
            f"the model {config.model.path} does not fit: its {count / 1e6:,.0f} M parameters "
            f"need {needed / _GIB:.1f} GiB on each of {ranks} ranks (weights, gradients, AdamW), "
            f"and {free / _GIB:.1f} GiB are free; raise training.ranks"
        )


def _size(config: Config, other: OtherModel) -> tuple[int, int]:
    """Return a model's parameters and its vocabulary, without its weights."""
    path, trust = path_of(config, other), config.model.trust_remote_code
    with _refusals(path), torch.device("meta"):
        shape = AutoConfig.from_pretrained(path, trust_remote_code=trust)
        kind = AutoModelForSequenceClassification if _scores(shape) else AutoModelForCausalLM
        empty = kind.from_config(shape, trust_remote_code=trust)
    return sum(p.numel() for p in empty.parameters()), shape.get_text_config().vocab_size


def _tokens(config: Config) -> int:
    """Return the size of the policy's tokenizer; a model's vocabulary is often a bit larger."""
    path = config.model.tokenizer or config.model.path
    trust = config.model.trust_remote_code
    with _refusals(path):
        return len(AutoTokenizer.from_pretrained(path, trust_remote_code=trust))


def path_of(config: Config, other: OtherModel) -> str:
    """Return the path of a model beside the policy: its own, or the policy's."""
    return other.path or config.model.path


def dtype_of(config: Config, other: OtherModel) -> torch.dtype:
    """Return the precision of the forward passes of a model beside the policy."""
    dtype: torch.dtype = getattr(torch, other.dtype or config.model.dtype)
    return dtype


def load_model(config: Config, other: OtherModel = POLICY) -> Any:
    """Load a causal language model in float32, without dropout, which would make every ratio wrong.

    Args:
        other: By default the policy, the model of `model.path`.

    Raises:
        InputError: when it cannot be loaded.
    """
    return _loaded(AutoModelForCausalLM, config, path_of(config, other))


def load_value_model(config: Config, other: OtherModel) -> Any:
    """Load the model that the value model starts from: a causal language model, or a reward model.

    Raises:
        InputError: when it cannot be loaded, or has other than one output.
    """
    path, trust = path_of(config, other), config.model.trust_remote_code
    with _refusals(path):
        shape = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    if not _scores(shape):
        return load_model(config, other)
    if shape.num_labels != 1:
        raise InputError(
            f"algorithm.advantage.model: {path} has {shape.num_labels} outputs; a value model "
            "starts from a reward model with one, or from a language model"
        )
    return _loaded(AutoModelForSequenceClassification, config, path)


def _loaded(kind: Any, config: Config, path: str) -> Any:
    with _refusals(path):
        model = kind.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=config.model.trust_remote_code
        )
    if config.training.offload:  # storages that map a file cannot be emptied
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    return model.eval()


def _scores(shape: Any) -> bool:
    """Return whether a checkpoint is a sequence classifier."""
    return any("SequenceClassification" in name for name in shape.architectures or ())


@contextmanager
def _refusals(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise InputError(f"the model {path} cannot be loaded: {error}") from error


def distribute(
    module: _Module, config: Config, device: torch.device, *, trained: bool = True
) -> _Module:
    """Move a module to its device, and shard it if there are several ranks.

    Each decoder layer is gathered only for its own computation.
    """
    layers = [m for m in module.modules() if type(m).__name__ in _layer_names(module)]
    if config.training.activation_checkpointing and trained:
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if not dist.is_initialized():
        return module.to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy()
    if module.dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=module.dtype, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(module, mesh=mesh, mp_policy=precision)
    return module.to(device)


def _layer_names(module: nn.Module) -> set[str]:
    """Return the class names of decoder layers, as Transformers' models declare them."""
    names: set[str] = set()
    for part in module.modules():
        names |= set(getattr(part, "_no_split_modules", None) or ())
    return names


def full_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter whole, one at a time; every rank must iterate over all of them."""
    for name, parameter in module.named_parameters():
        tensor = parameter.detach()
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
