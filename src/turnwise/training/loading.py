"""The trainer's models: their roles, their data types, their parts, and how they are loaded.

Forward passes use `model.dtype`. Weights that learn are float32 beside it, since steps with a small
learning rate vanish in bfloat16, or bfloat16 with steps that are rounded at random
(`training.weights_dtype`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from turnwise.chat.vision import ModelImages
from turnwise.config import AlgorithmConfig, Config, OtherModel
from turnwise.core.gguf import resolve_model
from turnwise.core.process import give_back
from turnwise.errors import InputError
from turnwise.training.algorithms import make_algorithm
from turnwise.training.attention import check_divisible, use_packed_attention
from turnwise.training.context import ContextGroup
from turnwise.training.linear import use_onednn
from turnwise.training.lora import ModelName, add_adapters
from turnwise.training.model import Critic, Models, RoutingReplay, Scorer
from turnwise.training.shards import can_be_sliced, read_shards, read_tensor, weight_files
from turnwise.training.vision import decoder_layers as decoder_layers
from turnwise.training.vision import vision_parameters

_Module = TypeVar("_Module", Scorer, Critic)
POLICY = OtherModel()
"""The model of `model.path` itself."""


def missing_model(config: AlgorithmConfig, name: str) -> str:
    """Return why the trainer lacks a model, and the key that adds it; "" if it has the model."""
    algorithm, kl = make_algorithm(config), config.kl
    if name == "value" and not algorithm.advantage.needs_values:
        return "there is no value model: set algorithm.advantage.name to gae"
    if name == "reference" and not (kl.coef or kl.model.path or algorithm.loss.needs_reference):
        return (
            "there is no reference model: set algorithm.kl.coef, algorithm.kl.model.path, or "
            "algorithm.loss.name to dpo"
        )
    return ""


def models_beside(config: Config) -> dict[ModelName, OtherModel]:
    """Return the models that the trainer holds beside the policy."""
    beside: dict[ModelName, OtherModel] = {}
    if not missing_model(config.algorithm, "reference"):
        beside["reference"] = config.algorithm.kl.model
    if (needed := make_algorithm(config.algorithm).advantage.value_model) is not None:
        beside["value"] = needed.model
    for teacher in config.teachers().values():
        if teacher.in_ranks:
            beside["reference"] = OtherModel(path=teacher.model)
    return beside


def shared_roles(config: Config, beside: Mapping[ModelName, OtherModel]) -> tuple[str, ...]:
    """Return the roles that the policy's backbone plays with adapters: those of all policies, and
    of models without a path or a precision of their own; none without LoRA."""
    if not config.model.lora.rank:
        return ()
    shared = (
        name
        for name, other in beside.items()
        if path_of(config, other) == path_of(config) and other.dtype in (None, config.model.dtype)
    )
    return (*config.policies, *shared)


def path_of(config: Config, other: OtherModel = POLICY) -> str:
    """Return from where a model is loaded: its own path, or the policy's."""
    return resolve_model(other.path or config.model.path)


def dtype_of(config: Config, other: OtherModel = POLICY) -> torch.dtype:
    """Return the precision of a model's forward passes."""
    dtype: torch.dtype = getattr(torch, other.dtype or config.model.dtype)
    return dtype


def learning_dtype(config: Config, other: OtherModel = POLICY) -> torch.dtype:
    """Return the type in which the weights of a model that learns are kept, and of a reference."""
    kept: torch.dtype = getattr(torch, config.training.weights_dtype)
    return kept if dtype_of(config, other) == kept else torch.float32


def load_model(
    config: Config, other: OtherModel = POLICY, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Load a language model, with the part that reads images if it has one; with several ranks,
    without weights that `distribute` can read."""
    path = path_of(config, other)
    return _loaded(language_model_class(_shape_of(config, path)), config, path, dtype)


def language_model_class(shape: PretrainedConfig) -> Any:
    """Return Transformers' class of language models of a configuration, those that read images
    included."""
    text = type(shape) in MODEL_FOR_CAUSAL_LM_MAPPING
    if not text and type(shape) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def _shape_of(config: Config, path: str) -> PretrainedConfig:
    with translate_unreadable(path):
        shape: PretrainedConfig = AutoConfig.from_pretrained(
            path, trust_remote_code=config.model.trust_remote_code
        )
    return shape


def load_value_model(config: Config, other: OtherModel) -> PreTrainedModel:
    """Load the model that the value model starts from: a language model, or a reward model."""
    path = path_of(config, other)
    shape = _shape_of(config, path)
    dtype = learning_dtype(config, other)
    if not is_classifier(shape):
        return load_model(config, other, dtype)
    if shape.num_labels != 1:
        raise InputError(
            f"algorithm.advantage.model: {path} has {shape.num_labels} outputs; a value model "
            "starts from a reward model with one, or from a language model"
        )
    return _loaded(AutoModelForSequenceClassification, config, path, dtype)


def _loaded(kind: Any, config: Config, path: str, dtype: torch.dtype) -> Any:
    def prepared(model: PreTrainedModel) -> PreTrainedModel:
        exchanges = use_packed_attention(model, config.training.attention)
        check_divisible(model, config.training.context_parallel, exchanges)
        return model.eval()  # dropout would make every ratio wrong

    trust = config.model.trust_remote_code
    with translate_unreadable(path):
        if dist.is_initialized() and (files := weight_files(path)):
            shape = AutoConfig.from_pretrained(path, trust_remote_code=trust)
            with torch.device("meta"):
                model = kind.from_config(shape, dtype=dtype, trust_remote_code=trust)
            if can_be_sliced(model):
                if hasattr(model, "score"):  # the head of a reward model, for the value model's
                    model.score.weight = nn.Parameter(read_tensor(files, "score.weight").float())
                return prepared(model)
        model = kind.from_pretrained(path, dtype=dtype, trust_remote_code=trust)
    if config.training.offload:  # storages that map a file cannot be emptied
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    return prepared(model)


def is_classifier(shape: PretrainedConfig) -> bool:
    return any("SequenceClassification" in name for name in shape.architectures or ())


@contextmanager
def translate_unreadable(path: str) -> Iterator[None]:
    """Raise an InputError that names the model, for errors of what reads it."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise InputError(f"the model {path} cannot be loaded: {error}") from error


def recompute(model: nn.Module, every: bool | int) -> list[nn.Module]:
    """Make all layers, none, or every N-th (`training.activation_checkpointing`) keep only their
    input, and compute their activations again in backward passes; return them."""
    chosen = decoder_layers(model)[:: int(every)] if every else []
    for layer in chosen:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return chosen


def load_models(config: Config, device: torch.device, group: ContextGroup | None = None) -> Models:
    """Load the policy and the models that are needed beside it, and distribute them."""
    if config.training.attention == "flex_attention" and device.type == "cpu":
        raise InputError("training.attention: flex_attention has no gradients on a CPU: set auto")
    beside = models_beside(config)
    roles = shared_roles(config, beside)
    # A frozen backbone needs no more precision than its forward passes.
    model = load_model(config, dtype=dtype_of(config) if roles else learning_dtype(config))
    if roles:
        add_adapters(model, config.model.lora, roles)
    replay = RoutingReplay(model) if config.engine.routing_replay else None
    bonus = config.algorithm.entropy.has_bonus
    readers: dict[str, ModelImages] = {}

    def prepared(model: PreTrainedModel, other: OtherModel = POLICY) -> ModelImages:
        """Freeze the part that reads images if it does not learn; return its processor."""
        for parameter in () if config.model.train_vision else vision_parameters(model):
            parameter.requires_grad_(False)
        path = path_of(config, other)
        own = ModelImages(config.model.model_copy(update={"path": path}))
        return readers.setdefault(path, own)

    images = prepared(model)
    scorer = Scorer(model, config.sampling, dtype_of(config), roles, replay, bonus, images)
    policy = distribute(scorer, config, device, POLICY)
    reference = policy if "reference" in roles else None
    if reference is None and (other := beside.get("reference")) is not None:
        model = load_model(config, other, learning_dtype(config, other))  # as the policy's
        images = prepared(model, other)
        frozen = Scorer(model, config.sampling, dtype_of(config, other), images=images)
        frozen.requires_grad_(False)
        reference = distribute(frozen, config, device, other, trained=False)
        own, new = ([(n, p.shape) for n, p in m.named_parameters()] for m in (reference, policy))
        if config.algorithm.kl.sync_steps and own != new:
            raise InputError(
                f"algorithm.kl.sync_steps: {path_of(config, other)} has other parameters than the "
                "policy and cannot move towards it: set it to 0, or remove algorithm.kl.model"
            )
    value: Critic | Scorer | None = policy if "value" in roles else None
    if value is None and (other := beside.get("value")) is not None:
        model = load_value_model(config, other)
        critic = Critic(model, dtype_of(config, other), prepared(model, other))
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

    Each decoder layer is gathered only for its own computation; the part that reads images with the
    embeddings, as ranks that have no image do not compute it. The files of `other`, which the
    module was made of, hold the weights that it still lacks.
    """
    use_onednn(module, device)
    if trained:
        recompute(module, config.training.activation_checkpointing)
    if not dist.is_initialized():
        return module.to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy()
    if module.dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=module.dtype, reduce_dtype=torch.float32)
    apart: bool = not config.engine.images_per_prompt  # then no rank ever does
    for layer in (*decoder_layers(module, of_images=apart), module):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    path = path_of(config, other)
    with translate_unreadable(path):
        if any(parameter.is_meta for parameter in module.parameters()):
            read_shards(module, weight_files(path), device)
    return module.to(device)
