"""verl's interfaces: server manager, chat scheduler and `DataProto`."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turnwise.compat.verl.chat_scheduler import ChatCompletionScheduler
    from turnwise.compat.verl.data_proto import DataProto
    from turnwise.compat.verl.manager import ChatHost, LLMServerManager

__all__ = ["ChatCompletionScheduler", "ChatHost", "DataProto", "LLMServerManager"]
_PLACES = {"ChatCompletionScheduler": "chat_scheduler", "DataProto": "data_proto"}


def __getattr__(name: str) -> object:
    """Import a class at its first use, because errors about keys need this package without Ray."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    found: object = getattr(import_module(f"{__name__}.{_PLACES.get(name, 'manager')}"), name)
    return found
