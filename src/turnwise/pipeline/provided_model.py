"""The model that a module's `model_provider` returns, as values of the configuration."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, runtime_checkable

from turnwise.compat.chatlearn.model_file import Settings
from turnwise.errors import InputError


@runtime_checkable
class _Saveable(Protocol):
    """A model of transformers, or its configuration."""

    def save_pretrained(self, folder: str) -> object: ...


class ProvidedModel:
    """A model by name, or in a temporary folder that exists as long as this object.

    Args:
        name: The module's, for errors.
        model: As `VLLMModule.model_provider` returns it.
        tokenizer: Folder or name of the model's tokenizer; None is the one that the model was
            saved with.

    Raises:
        InputError: when it is not a model, or has no tokenizer.
    """

    def __init__(self, name: str, model: object, tokenizer: str | None) -> None:
        self.settings: Settings = {}
        """Values of the configuration that name the model and its tokenizer."""
        if model is None:
            return
        if isinstance(model, str | Path):
            self.settings = {"model.path": str(model)}
            return
        if not isinstance(model, _Saveable):
            raise InputError(
                f"{name}: model_provider returns a model's folder or name, a model of transformers "
                f"or its configuration, not {repr(model)[:80]}; override generator_provider to "
                "replace the sampler"
            )
        tokenizer = tokenizer or getattr(model, "name_or_path", "")
        if not tokenizer:
            raise InputError(
                f"{name}: the model of model_provider has no tokenizer; name one in the module's "
                "file (tokenizer)"
            )
        self._folder = TemporaryDirectory(prefix="turnwise-model-")
        _with_weights(model).save_pretrained(self._folder.name)
        self.settings = {"model.path": self._folder.name, "model.tokenizer": tokenizer}


def _with_weights(model: _Saveable) -> _Saveable:
    """Return the model; if only a configuration is given, one with random weights."""
    if hasattr(model, "state_dict"):
        return model
    from transformers import AutoModelForCausalLM

    made: _Saveable = AutoModelForCausalLM.from_config(model)
    return made
