"""ChatLearn's helpers for a policy's `model_provider`, with its names."""

import sys
from collections.abc import Callable

from turnwise.compat.chatlearn.model_file import Args
from turnwise.core.optional import Foreign


def get_model(
    model_provider: Callable[[], Foreign], args: Args | None = None, wrap_with_ddp: bool = False
) -> Foreign:
    """Return the model of a `model_provider`, for evaluation; engines and trainer load their own.

    Args:
        args: The module's `model_args`; their `load` is returned where the provider returns None,
            because the model is that of the files.
        wrap_with_ddp: Not looked at: the trainer shards its own model.

    Example:
        class Policy(VLLMModule):
            def setup(self):
                self.model = get_model(self.model_provider, self.model_args)
    """
    model = model_provider()
    if model is None:
        return (args or {}).get("load")
    return model.eval() if hasattr(model, "eval") else model


def print_rank_0(message: object) -> None:
    """Print a line at once: a module is one process, whatever its engines' sizes.

    Example:
        print_rank_0("building the model ...")
    """
    sys.stdout.write(f"{message}\n")
    sys.stdout.flush()
