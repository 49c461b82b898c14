"""The trainer's models: their roles, their data types, their parts, and how they are loaded.

Forward passes use `model.dtype`. Weights that learn are kept in float32, because steps with a small
learning rate vanish in bfloat16. With `training.weights_dtype` bfloat16, these weights are kept in
bfloat16, and optimizer steps use stochastic rounding.
"""

from collections.abc import Iterator, Mapping, Sequence
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
from turnwise.config import (
    AlgorithmConfig,
    Config,
    ModelConfig,
    OtherModel,
    TeacherConfig,
    TrainingConfig,
)
from turnwise.core.gguf import resolve_model
from turnwise.core.precision import precision
from turnwise.core.process import trim_memory
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
    """Return why the trainer lacks a model, and the setting that adds it; "" if the trainer has the
    model."""
    algorithm, kl = make_algorithm(config), config.kl
    if name == "value" and not algorithm.advantage.needs_values:
        return "there is no value model: set algorithm.advantage.name to gae"
    if name == "reference" and not (kl.coef or kl.model.path or algorithm.loss.needs_reference):
        return (
            "there is no reference model: set algorithm.kl.coef, algorithm.kl.model.path, or "
            "algorithm.loss.name to dpo"
        )
    return ""


def additional_models(
    algorithm: AlgorithmConfig, teachers: Mapping[str, TeacherConfig]
) -> dict[ModelName, OtherModel]:
    """Return the models that the trainer holds in addition to the policy."""
    beside: dict[ModelName, OtherModel] = {}
    if not missing_model(algorithm, "reference"):
        beside["reference"] = algorithm.kl.model
    if (needed := make_algorithm(algorithm).advantage.value_model) is not None:
        beside["value"] = needed.model
    for teacher in teachers.values():
        if teacher.in_ranks:
            beside["reference"] = OtherModel(path=teacher.model)
    return beside


def shared_roles(
    model: ModelConfig, policies: Sequence[str], beside: Mapping[ModelName, OtherModel]
) -> tuple[str, ...]:
    """Return the roles that the policy's backbone plays with adapters: all policies, and the models
    in `beside` that have the policy's path and precision; () without LoRA."""
    if not model.lora.rank:
        return ()
    shared = (
        name
        for name, other in beside.items()
        if path_of(model, other) == path_of(model) and dtype_of(model, other) == dtype_of(model)
    )
    return (*policies, *shared)


def path_of(model: ModelConfig, other: OtherModel = POLICY) -> str:
    """Return the path that a model is loaded from: its own path if it is set, else the policy's."""
    return resolve_model(other.path or model.path)


def dtype_of(model: ModelConfig, other: OtherModel = POLICY) -> torch.dtype:
    """Return the precision of a model's forward passes."""
    name = other.dtype or precision(model, torch.cuda.is_available())
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def learning_dtype(
    model: ModelConfig, training: TrainingConfig, other: OtherModel = POLICY
) -> torch.dtype:
    """Return the dtype in which weights are kept, for a model that learns or a reference model with
    weights of its own."""
    kept: torch.dtype = getattr(torch, training.weights_dtype)
    return kept if dtype_of(model, other) == kept else torch.float32


def load_model(
    model: ModelConfig,
    training: TrainingConfig,
    other: OtherModel = POLICY,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Load a language model, including the part that reads images if it has such a part. With
    several ranks, weights that `distribute` can read from the files are not loaded yet."""
    path, trust = path_of(model, other), model.trust_remote_code
    return _loaded(language_model_class(_shape_of(path, trust)), training, path, dtype, trust)


def language_model_class(shape: PretrainedConfig) -> Any:
    """Return Transformers' auto class for a language model with this configuration, which may read
    images."""
    text = type(shape) in MODEL_FOR_CAUSAL_LM_MAPPING
    if not text and type(shape) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def _shape_of(path: str, trust: bool) -> PretrainedConfig:
    with translate_unreadable(path):
        shape: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    return shape


def load_value_model(
    model: ModelConfig, training: TrainingConfig, other: OtherModel
) -> PreTrainedModel:
    """Load the model that the value model starts from: a language model or a reward model."""
    path, trust = path_of(model, other), model.trust_remote_code
    shape = _shape_of(path, trust)
    dtype = learning_dtype(model, training, other)
    if not is_classifier(shape):
        return load_model(model, training, other, dtype)
    if shape.num_labels != 1:
        raise InputError(
            f"algorithm.advantage.model: {path} has {shape.num_labels} outputs; a value model "
            "starts from a reward model with one, or from a language model"
        )
    return _loaded(AutoModelForSequenceClassification, training, path, dtype, trust)


def _loaded(kind: Any, training: TrainingConfig, path: str, dtype: torch.dtype, trust: bool) -> Any:
    def prepared(model: PreTrainedModel) -> PreTrainedModel:
        exchanges = use_packed_attention(model, training.attention)
        check_divisible(model, training.context_parallel, exchanges)
        return model.eval()  # dropout would make every ratio wrong

    with translate_unreadable(path):
        if dist.is_initialized() and (files := weight_files(path)):
            shape = AutoConfig.from_pretrained(path, trust_remote_code=trust)
            with torch.device("meta"):
                model = kind.from_config(shape, dtype=dtype, trust_remote_code=trust)
            if can_be_sliced(model):
                if hasattr(model, "score"):  # a reward model's head, which `Critic` copies
                    model.score.weight = nn.Parameter(read_tensor(files, "score.weight").float())
                return prepared(model)
        model = kind.from_pretrained(path, dtype=dtype, trust_remote_code=trust)
    if training.offload:  # storages that map a file cannot be emptied
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    return prepared(model)


def is_classifier(shape: PretrainedConfig) -> bool:
    return any("SequenceClassification" in name for name in shape.architectures or ())


@contextmanager
def translate_unreadable(path: str) -> Iterator[None]:
    """Convert errors that occur while a model is read to an InputError that names the model."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise InputError(f"the model {path} cannot be loaded: {error}") from error


def recompute(model: nn.Module, every: bool | int) -> list[nn.Module]:
    """Make all layers, no layer, or every N-th layer (`training.activation_checkpointing`) keep
    only their input and compute activations again in backward passes; return these layers."""
    chosen = decoder_layers(model)[:: int(every)] if every else []
    for layer in chosen:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return chosen


def load_models(
    config: Config,
    beside: Mapping[ModelName, OtherModel],
    device: torch.device,
    group: ContextGroup | None = None,
) -> Models:
    """Load the policy and the models in `beside`, and distribute them over the ranks."""
    settings, training = config.model, config.training
    if training.attention == "flex_attention" and device.type == "cpu":
        raise InputError("training.attention: flex_attention has no gradients on a CPU: set auto")
    roles = shared_roles(settings, config.policies, beside)
    # A frozen backbone needs no more precision than its forward passes use.
    kept = dtype_of(settings) if roles else learning_dtype(settings, training)
    model = load_model(settings, training, dtype=kept)
    if roles:
        add_adapters(model, settings.lora, roles)
    replay = RoutingReplay(model) if config.engine.routing_replay else None
    bonus = config.algorithm.entropy.has_bonus
    readers: dict[str, ModelImages] = {}

    def prepared(model: PreTrainedModel, other: OtherModel = POLICY) -> ModelImages:
        """Freeze the part that reads images if it does not learn; return the model's processor."""
        for parameter in () if settings.train_vision else vision_parameters(model):
            parameter.requires_grad_(False)
        path = path_of(settings, other)
        own = ModelImages(settings.model_copy(update={"path": path}))
        return readers.setdefault(path, own)

    images = prepared(model)
    scorer = Scorer(model, config.sampling, dtype_of(settings), roles, replay, bonus, images)
    spread = partial(distribute, device=device, images=bool(config.engine.images_per_prompt))
    recomputed = training.activation_checkpointing
    policy = spread(scorer, path=path_of(settings), recomputed=recomputed)
    reference = policy if "reference" in roles else None
    if reference is None and (other := beside.get("reference")) is not None:
        kept = learning_dtype(settings, training, other)  # the same rule as for the policy
        model = load_model(settings, training, other, kept)
        images = prepared(model, other)
        frozen = Scorer(model, config.sampling, dtype_of(settings, other), images=images)
        frozen.requires_grad_(False)
        reference = spread(frozen, path=path_of(settings, other))
        own, new = ([(n, p.shape) for n, p in m.named_parameters()] for m in (reference, policy))
        if config.algorithm.kl.sync_steps and own != new:
            raise InputError(
                f"algorithm.kl.sync_steps: {path_of(settings, other)} has other parameters than "
                "the policy and cannot move towards it: set it to 0, or remove algorithm.kl.model"
            )
    value: Critic | Scorer | None = policy if "value" in roles else None
    if value is None and (other := beside.get("value")) is not None:
        model = load_value_model(settings, training, other)
        critic = Critic(model, dtype_of(settings, other), prepared(model, other))
        value = spread(critic, path=path_of(settings, other), recomputed=recomputed)
    trim_memory()
    return Models(policy, reference, value, device, group)


def distribute(
    module: _Module,
    device: torch.device,
    path: str,
    *,
    recomputed: bool | int = False,
    images: bool = True,
) -> _Module:
    """Move a module to its device, and shard it if there are several ranks.

    Each decoder layer is gathered only for its own computation. The part that reads images is
    gathered together with the embeddings, because ranks without an image do not compute this part.
    The files at `path`, from which the module was made, hold the weights that the module still
    lacks. `recomputed` is `training.activation_checkpointing`. Without `images`, no rank ever reads
    an image.
    """
    use_onednn(module, device)
    recompute(module, recomputed)
    if not dist.is_initialized():
        return module.to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy()
    if module.dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=module.dtype, reduce_dtype=torch.float32)
    for layer in (*decoder_layers(module, of_images=not images), module):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    with translate_unreadable(path):
        if any(parameter.is_meta for parameter in module.parameters()):
            read_shards(module, weight_files(path), device)
    return module.to(device)
