"""Modules: a pipeline written as a program of plain calls, around a model that generates.

A module says what its prompts, requests and outputs are; a pipeline runs the engines and the
trainer behind it, and keeps the engines at the trainer's weights.
"""

from turnwise.modules.module import VLLMModule
from turnwise.modules.outputs import CompletionOutput, RequestOutput
from turnwise.modules.pipeline import Pipeline

__all__ = ["CompletionOutput", "Pipeline", "RequestOutput", "VLLMModule"]
