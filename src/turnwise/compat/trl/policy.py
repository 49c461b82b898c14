"""The policy and the reference model in the script's process: `GRPOTrainer.model`, which scripts
read, save and push, and `ref_model`.

The run trains in other processes, so these are copies for reading. Before training they have the
given weights; after training they have the weights of the last checkpoint. The run ignores changes
to them.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.config.data import ADAPTER_CONFIG
from turnwise.core.gguf import resolve_model
from turnwise.core.optional import Foreign, optional
from turnwise.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADAPTER = "default"
"""PEFT's default name of an adapter."""


@dataclass
class Policy:
    """A model of Transformers or PEFT, which is loaded at the first use of `model`."""

    given: Foreign
    """The script's model object, or a path or name, which is then equal to `path`."""
    path: str
    """Folder or Hugging Face name of the model to load."""
    lora: Foreign
    """PEFT's configuration of the adapters that are trained; None trains all weights."""
    dtype: str
    """Name of the dtype of a loaded model's weights."""
    trust_remote_code: bool = False
    """Whether code that comes with the weights may run."""
    reference: bool = False
    """Whether this is the reference model; its weights are in a checkpoint's `state` folder."""
    checkpoint: Path | None = None
    """Folder of the weights; None keeps the weights of the given model."""

    @cached_property
    def model(self) -> "PreTrainedModel":
        """The model; always the same object."""
        model: PreTrainedModel = self.given
        if isinstance(self.given, str | Path):
            model = self._loaded(self.path, self.dtype)
        if self.lora is not None and not hasattr(model, "peft_config"):
            peft = optional("peft", "lora", "peft_config")
            model = peft.get_peft_model(model, self.lora)
        self._read(model)
        return model

    def refresh(self, checkpoint: Path | None) -> None:
        """Load the weights of a checkpoint in place, so that a script's references to the model or
        to its parameters see them."""
        self.checkpoint = checkpoint
        if "model" in vars(self):
            self._read(self.model)

    def _read(self, model: "PreTrainedModel") -> None:
        folder = self.checkpoint
        if folder is None:
            return
        if self.reference:
            from torch import nn

            from turnwise.training.checkpoint_state import load_moved

            scorer = nn.Module()  # the state's keys begin with "model.", as in the trainer
            scorer.model = model
            load_moved(folder, "reference", scorer)
        elif (folder / ADAPTER_CONFIG).is_file():
            from safetensors.torch import load_file

            from turnwise.training.lora import ADAPTER_TENSORS  # imports torch

            peft = optional("peft", "lora", "peft_config")
            peft.set_peft_model_state_dict(model, load_file(folder / ADAPTER_TENSORS), _ADAPTER)
        else:
            model.load_state_dict(self._loaded(str(folder), "auto").state_dict())

    def _loaded(self, path: str, dtype: str) -> "PreTrainedModel":
        from transformers import AutoConfig  # seconds to import

        from turnwise.training.loading import language_model_class  # imports torch

        trust = self.trust_remote_code
        try:
            found = resolve_model(path)
            kind = language_model_class(AutoConfig.from_pretrained(found, trust_remote_code=trust))
            model: PreTrainedModel = kind.from_pretrained(
                found, dtype=dtype, trust_remote_code=trust
            )
        except (OSError, ValueError) as error:
            raise InputError(f"the model {path} cannot be loaded: {error}") from error
        return model


def lora_of(model: Foreign, given: Foreign) -> Foreign:
    """Return the configuration of the adapters to train: `given`, or the configuration of a PEFT
    model's only adapter, which must be untrained."""
    adapters: dict[str, Foreign] | None = getattr(model, "peft_config", None)
    if adapters is None:
        return given
    if given is not None or [*adapters] != [_ADAPTER]:
        raise InputError(
            f"GRPOTrainer: model has an adapter already: pass the plain model with peft_config, or "
            f"a model with one adapter, {_ADAPTER}, without it"
        )
    for key, parameter in model.named_parameters():
        if ".lora_B." in key and bool(parameter.any()):
            raise InputError(
                f"GRPOTrainer: model has an adapter that is already trained ({key} is not 0), and "
                "training starts with fresh ones: add it to the weights with "
                "model.merge_and_unload(), and pass peft_config"
            )
    return adapters[_ADAPTER]
