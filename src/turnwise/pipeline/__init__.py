"""Modules and pipelines: training loops that users write as programs of synchronous calls.

A module defines its prompts, requests and outputs; a pipeline runs the engines and the trainer
behind it, and keeps the engines at the trainer's weights. `compat.chatlearn.pipeline_file`
describes the file with several models that `turnwise pipeline` runs without a program.
`LLMServerManager` runs only engines, for chats and batches of conversations. The names of ChatLearn
are here: `VLLMPromptPipeline`, `get_model`, `print_rank_0`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turnwise.compat.chatlearn.helpers import (
        PromptPipeline,
        VLLMPromptPipeline,
        get_model,
        print_rank_0,
    )
    from turnwise.compat.verl import LLMServerManager
    from turnwise.pipeline.module import (
        ReferenceModule,
        RewardModule,
        TrainerModule,
        ValueModule,
        VLLMModule,
    )
    from turnwise.pipeline.outputs import CompletionOutput, RequestOutput
    from turnwise.pipeline.pipeline import Pipeline

__all__ = [
    "CompletionOutput",
    "LLMServerManager",
    "Pipeline",
    "PromptPipeline",
    "ReferenceModule",
    "RequestOutput",
    "RewardModule",
    "TrainerModule",
    "VLLMModule",
    "VLLMPromptPipeline",
    "ValueModule",
    "get_model",
    "print_rank_0",
]
_HELPERS = ("PromptPipeline", "VLLMPromptPipeline", "get_model", "print_rank_0")
_PLACES = dict.fromkeys(_HELPERS, "turnwise.compat.chatlearn.helpers") | {
    "CompletionOutput": "turnwise.pipeline.outputs",
    "LLMServerManager": "turnwise.compat.verl",
    "Pipeline": "turnwise.pipeline.pipeline",
    "RequestOutput": "turnwise.pipeline.outputs",
}


def __getattr__(name: str) -> object:
    """Import a class at its first use: a pipeline's imports take seconds."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    found: object = getattr(import_module(_PLACES.get(name, "turnwise.pipeline.module")), name)
    return found
