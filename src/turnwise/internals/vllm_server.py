"""vLLM's HTTP server: the names that the OpenAI server uses, and what it uses beyond them.

Checked against vLLM 0.32. If vLLM moves them, only this file has to change.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.generate.base.protocol import DeltaMessage, FunctionCall, ToolCall
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GracefulHTTPError, VLLMError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.renderers import renderer_from_config
from vllm.renderers.chat_utils import has_non_text_content, make_tool_call_id
from vllm.renderers.hf import resolve_chat_template_content_format
from vllm.renderers.inputs.preprocess import extract_prompt_components
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from turnwise.internals import internal

if TYPE_CHECKING:
    from starlette.datastructures import State
    from vllm.parser.abstract_parser import Parser
    from vllm.tokenizers import TokenizerLike

_PARSERS = {
    "openai_serving_chat": "parser_cls",
    "openai_serving_chat_batch": "parser_cls",
    "anthropic_serving_messages": "parser_cls",
    "openai_serving_responses": "parser",
}
"""The attributes of vLLM's services that hold a class of parsers."""

SamplingRequest: TypeAlias = ChatCompletionRequest | CompletionRequest | ResponsesRequest
"""A request that samples; Anthropic's requests have become chat completions at this point."""


def template_variables(
    chat: OpenAIServingChat, request: ChatCompletionRequest
) -> dict[str, object]:
    """Return the variables of the chat template that a request sets, with the server's defaults."""
    variables: dict[str, object] = chat._effective_chat_template_kwargs(request)
    return variables


def make_parser(
    chat: OpenAIServingChat,
    request: ChatCompletionRequest,
    tokenizer: "TokenizerLike",
    variables: dict[str, object],
) -> "Parser":
    """Return the parser of a request's answers, as the server makes it for its own."""
    return chat._make_parser(request, tokenizer, variables)


def replace_parsers(state: "State", replace: Callable[["type[Parser]"], "type[Parser]"]) -> None:
    """Replace the class of the parsers of answers, of each service that has one."""
    for name, attribute in _PARSERS.items():
        service = getattr(state, name)
        if (parser := getattr(service, attribute)) is not None:
            setattr(service, attribute, replace(parser))


def choose_adapters(serving: OpenAIServingChat, choose: Callable[..., object]) -> None:
    """Let a function choose the adapter of each request, which vLLM finds by its model alone."""
    serving._maybe_get_adapters = choose


def keep_clients_mistakes_out_of_the_log() -> None:
    """Drop the tracebacks that routes log of requests which they refuse: the client has got the
    reason, and a client that repeats its mistake would fill the log."""

    def is_ours(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        known = isinstance(error, Exception)
        return not known or create_error_response(error).error.code >= 500

    for name in [*logging.root.manager.loggerDict]:
        if name.startswith("vllm.entrypoints."):
            logging.getLogger(name).addFilter(is_ours)


internal(OpenAIServingChat, "_effective_chat_template_kwargs", "self", "request")
_parameters = ("self", "request", "tokenizer", "chat_template_kwargs")
internal(OpenAIServingChat, "_make_parser", *_parameters)
internal(OpenAIServingChat, "_maybe_get_adapters", "self", "request")
