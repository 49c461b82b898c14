"""ChatLearn's modules, pipelines, model files and pipeline files, under ChatLearn's names.

A module defines its prompts, requests and outputs. A pipeline runs the engines and the trainer for
its modules, and keeps the engines' weights equal to the trainer's. `pipeline_file` describes the
file with several models that `turnwise pipeline` runs without a program.
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
    from turnwise.compat.chatlearn.module import (
        ReferenceModule,
        RewardModule,
        TrainerModule,
        ValueModule,
        VLLMModule,
    )
    from turnwise.compat.chatlearn.outputs import CompletionOutput, RequestOutput
    from turnwise.compat.chatlearn.pipeline import Pipeline
    from turnwise.compat.chatlearn.program import (
        Evaluator,
        GRPOEngine,
        OnlineDPOEngine,
        ProgramEngine,
        RLHFEngine,
        get_args,
        init,
    )

__all__ = [
    "CompletionOutput",
    "Evaluator",
    "GRPOEngine",
    "OnlineDPOEngine",
    "Pipeline",
    "ProgramEngine",
    "PromptPipeline",
    "RLHFEngine",
    "ReferenceModule",
    "RequestOutput",
    "RewardModule",
    "TrainerModule",
    "VLLMModule",
    "VLLMPromptPipeline",
    "ValueModule",
    "get_args",
    "get_model",
    "init",
    "print_rank_0",
]
_PROGRAM = (
    *("ProgramEngine", "Evaluator", "GRPOEngine", "OnlineDPOEngine", "RLHFEngine"),
    *("get_args", "init"),
)
_HELPERS = ("PromptPipeline", "VLLMPromptPipeline", "get_model", "print_rank_0")
_PLACES = {
    **dict.fromkeys(_HELPERS, "turnwise.compat.chatlearn.helpers"),
    **dict.fromkeys(_PROGRAM, "turnwise.compat.chatlearn.program"),
    "CompletionOutput": "turnwise.compat.chatlearn.outputs",
    "Pipeline": "turnwise.compat.chatlearn.pipeline",
    "RequestOutput": "turnwise.compat.chatlearn.outputs",
}


def __getattr__(name: str) -> object:
    """Import a name at its first use, because a pipeline's imports take seconds."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    found: object = getattr(
        import_module(_PLACES.get(name, "turnwise.compat.chatlearn.module")), name
    )
    return found
