"""The policy, and the reference model, in a script's own memory: `GRPOTrainer.model`, which scripts
read, save and push, and `ref_model`.

The run trains in processes of its own, so this is a copy for reading: it has the given weights
before training, and those of the last checkpoint after it. Changes to it are not trained on.
"""

import copy
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.config.data import ADAPTER_CONFIG
from turnwise.core.gguf import resolve_model
from turnwise.core.optional import Foreign, optional
from turnwise.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADAPTER = "default"
"""PEFT's name of a model's adapter, unless another is given."""


class Policy:
    """A model of Transformers, or of PEFT, that is loaded when it is first asked for.

    Args:
        given: The script's own model; a path or a name, too, which is `path`.
        path: Folder or Hugging Face name of the model to load.
        lora: PEFT's configuration of the adapters that are trained; None trains all weights.
        dtype: Name of the type of a loaded model's weights.
        trust_remote_code: Whether code that comes with the weights may run.
        reference: Whether it is the reference model, whose weights are in a checkpoint's state.

    Example:
        policy = Policy("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", None, "float32")
        policy.refresh(result.checkpoint)
        policy.model.save_pretrained("trained")
    """

    def __init__(
        self,
        given: Foreign,
        path: str,
        lora: Foreign,
        dtype: str,
        *,
        trust_remote_code: bool = False,
        reference: bool = False,
    ) -> None:
        self._reference = reference
        self._given = None if isinstance(given, str | Path) else given
        self._path = path
        self._lora = lora
        self._dtype = dtype
        self._trust = trust_remote_code
        self._model: Foreign = None
        self._checkpoint: Path | None = None

    @property
    def model(self) -> "PreTrainedModel":
        """The model, always the same object."""
        if self._model is None:
            model = self._given
            if model is None:
                model = load_model(self._path, self._dtype, trust_remote_code=self._trust)
            if self._lora is not None and not hasattr(model, "peft_config"):
                peft = optional("peft", "lora", "peft_config")
                model = peft.get_peft_model(model, self._lora)
            self._model = model
            self._read()
        loaded: PreTrainedModel = self._model
        return loaded

    def refresh(self, checkpoint: Path | None) -> None:
        """Give the model the weights of a checkpoint, in place: references that a script holds to
        the model or its parameters see them."""
        self._checkpoint = checkpoint
        if self._model is not None:
            self._read()

    def _read(self) -> None:
        folder = self._checkpoint
        if folder is None:
            return
        if self._reference:
            from torch import nn

            from turnwise.training.checkpoint_state import load_moved

            scorer = nn.Module()  # as the trainer holds it
            scorer.model = self._model
            load_moved(folder, "reference", scorer)
        elif (folder / ADAPTER_CONFIG).is_file():
            from safetensors.torch import load_file

            from turnwise.training.lora import ADAPTER_TENSORS  # imports torch

            peft = optional("peft", "lora", "peft_config")
            tensors = load_file(folder / ADAPTER_TENSORS)
            peft.set_peft_model_state_dict(self._model, tensors, adapter_name=_ADAPTER)
        else:
            trained = load_model(str(folder), "auto", trust_remote_code=self._trust)
            self._model.load_state_dict(trained.state_dict())


def load_model(path: str, dtype: str, *, trust_remote_code: bool) -> "PreTrainedModel":
    """Load a language model on the CPU; an InputError names what cannot be loaded."""
    from transformers import AutoModelForCausalLM  # seconds to import

    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            resolve_model(path), dtype=dtype, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise InputError(f"the model {path} cannot be loaded: {error}") from error
    return model


def lora_of(model: Foreign, given: Foreign) -> Foreign:
    """Return the configuration of the adapters to train: the given one, or that of the one adapter
    of a PEFT model, which must be fresh."""
    if not hasattr(model, "peft_config"):
        return given
    if given is not None:
        raise InputError(
            "GRPOTrainer: model has an adapter already: pass the plain model with peft_config"
        )
    (name, lora), *others = model.peft_config.items()
    if others or name != _ADAPTER:
        names = ", ".join(model.peft_config)
        raise InputError(
            f"GRPOTrainer: model has the adapters {names}, and one named {_ADAPTER} is trained: "
            "pass the plain model with peft_config"
        )
    for key, parameter in model.named_parameters():
        if ".lora_B." in key and bool(parameter.any()):
            raise InputError(
                f"GRPOTrainer: model has an adapter that is already trained ({key} is not 0), and "
                "training starts with fresh ones: add it to the weights with "
                "model.merge_and_unload(), and pass peft_config"
            )
    return lora


def without_adapters(model: Foreign) -> Foreign:
    """Return a copy of a PEFT model's base; a plain model is returned as it is."""
    return copy.deepcopy(model).unload() if hasattr(model, "peft_config") else model
