"""vLLM's HTTP server: the public names and the internals that our OpenAI server uses.

Checked against vLLM 0.32. If vLLM moves these names, only this file has to change.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from openai.types.responses import ResponseErrorEvent
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.generate.base.protocol import (
    DeltaMessage,
    FunctionCall,
    ToolCall,
    validate_request_mm_kwargs,
)
from vllm.entrypoints.generate.base.serving import clamp_prompt_logprobs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.protocol import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseInProgressEvent,
    ResponseRawMessageAndToken,
    ResponsesRequest,
    ResponsesResponse,
    ResponseUsage,
)
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.openai.responses.streaming_events import (
    SimpleStreamingEventProcessor as EventProcessor,
)
from vllm.entrypoints.openai.responses.streaming_events import split_delta
from vllm.entrypoints.openai.responses.utils import (
    build_response_output_items,
    construct_input_messages,
    construct_tool_dicts,
)
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import (
    GracefulHTTPError,
    VLLMError,
    VLLMNotFoundError,
    VLLMValidationError,
)
from vllm.inputs import tokens_input
from vllm.logprobs import Logprob
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.parser.abstract_parser import Parser
from vllm.renderers import renderer_from_config
from vllm.renderers.chat_utils import has_non_text_content, make_tool_call_id
from vllm.renderers.inputs.preprocess import extract_prompt_components
from vllm.renderers.params import TokenizeParams
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from turnwise.internals import internal

if TYPE_CHECKING:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionLogProbs
    from vllm.tokenizers import TokenizerLike

SamplingRequest: TypeAlias = ChatCompletionRequest | CompletionRequest | ResponsesRequest
"""A request that samples. Anthropic's requests are first converted to chat completions."""


def template_variables(
    chat: OpenAIServingChat, request: ChatCompletionRequest
) -> dict[str, object]:
    """Return the chat template's variables for a request, including the server's defaults."""
    variables: dict[str, object] = chat._effective_chat_template_kwargs(request)
    return variables


def make_parser(
    chat: OpenAIServingChat,
    request: ChatCompletionRequest,
    tokenizer: "TokenizerLike",
    variables: dict[str, object],
) -> Parser:
    """Return the parser that vLLM's server would use for a request's answers."""
    return chat._make_parser(request, tokenizer, variables)


def chat_logprobs(
    chat: OpenAIServingChat,
    request: ChatCompletionRequest,
    token_ids: list[int],
    logprobs: list[dict[int, Logprob]],
) -> "ChatCompletionLogProbs":
    """Return the log-probs of tokens in the form of OpenAI's chat completions."""
    return chat._create_chat_logprobs(
        token_ids=token_ids,
        top_logprobs=logprobs,
        tokenizer=chat.renderer.tokenizer,
        num_output_top_logprobs=request.top_logprobs,
        logprob_token_ids=request.logprob_token_ids,
        return_as_token_id=request.return_tokens_as_token_ids,
    )


def response_logprobs(
    responses: OpenAIServingResponses,
    request: ResponsesRequest,
    token_ids: list[int],
    logprobs: list[dict[int, Logprob]],
) -> list[Any]:
    """Return the log-probs of tokens in the form of OpenAI's Responses."""
    tokenizer, count = responses.renderer.tokenizer, request.top_logprobs
    made: list[Any] = responses._create_response_logprobs(token_ids, logprobs, tokenizer, count)
    return made


def truncated(chat: OpenAIServingChat, request: Any, token_ids: list[int]) -> list[int]:
    """Return a prompt's ids, truncated by the request's `truncate_prompt_tokens`."""
    params: TokenizeParams = request.build_tok_params(chat.model_config)
    kept: list[int] = params._token_truncation(chat.renderer.tokenizer, token_ids)
    return kept


def choose_adapters(serving: OpenAIServingCompletion, choose: Callable[..., object]) -> None:
    """Let a function choose the adapter of each request. vLLM itself chooses it only by the model's
    name."""
    serving._maybe_get_adapters = choose


def keep_requests_out_of_the_log() -> None:
    """Keep tracebacks of refused requests, and bodies of Messages, out of the log.

    The client gets the reason for a refusal, and a client that repeats its mistake would fill the
    log. vLLM logs the bodies of Messages requests at debug level, which would fail for a body with
    half a character (a lone surrogate).
    """

    def is_ours(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        known = isinstance(error, Exception)
        return not known or create_error_response(error).error.code >= 500

    for name in [*logging.root.manager.loggerDict]:
        if name.startswith("vllm.entrypoints."):
            logging.getLogger(name).addFilter(is_ours)
    logging.getLogger("vllm.entrypoints.anthropic.serving").setLevel(logging.INFO)


internal(OpenAIServingChat, "_effective_chat_template_kwargs", "self", "request")
_parameters = ("self", "request", "tokenizer", "chat_template_kwargs")
internal(OpenAIServingChat, "_make_parser", *_parameters)
internal(OpenAIServingCompletion, "_maybe_get_adapters", "self", "request")
internal(OpenAIServingChat, "_create_chat_logprobs", "self", "token_ids", "top_logprobs")
internal(OpenAIServingResponses, "_create_response_logprobs", "self", "token_ids", "logprobs")
internal(TokenizeParams, "_token_truncation", "self", "tokenizer", "tokens")
