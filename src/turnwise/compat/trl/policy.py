"""The policy, and the reference model, in a script's own memory: `GRPOTrainer.model`, which scripts
read, save and push, and `ref_model`.

The run trains in processes of its own, so this is a copy for reading: it has the given weights
before training, and those of the last checkpoint after it. Changes to it are not trained on.
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
"""PEFT's name of a model's adapter, unless another is given."""


@dataclass
class Policy:
    """A model of Transformers, or of PEFT, that is loaded when it is first asked for."""

    given: Foreign
    """The script's own model; a path or a name, too, which is `path`."""
    path: str
    """Folder or Hugging Face name of the model to load."""
    lora: Foreign
    """PEFT's configuration of the adapters that are trained; None trains all weights."""
    dtype: str
    """Type of a loaded model's weights, by its name."""
    trust_remote_code: bool = False
    """Whether code that comes with the weights may run."""
    reference: bool = False
    """Whether it is the reference model, whose weights are in a checkpoint's state."""
    checkpoint: Path | None = None
    """Folder of the weights; None means those of the model as it was given."""

    @cached_property
    def model(self) -> "PreTrainedModel":
        """The model, always the same object."""
        model: PreTrainedModel = self.given
        if isinstance(self.given, str | Path):
            model = self._loaded(self.path, self.dtype)
        if self.lora is not None and not hasattr(model, "peft_config"):
            peft = optional("peft", "lora", "peft_config")
            model = peft.get_peft_model(model, self.lora)
        self._read(model)
        return model

    def refresh(self, checkpoint: Path | None) -> None:
        """Give the model the weights of a checkpoint, in place: references that a script holds to
        the model or its parameters see them."""
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

            scorer = nn.Module()  # as the trainer holds it
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
    """Return the configuration of the adapters to train: the given one, or that of the one adapter
    of a PEFT model, which must be fresh."""
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
