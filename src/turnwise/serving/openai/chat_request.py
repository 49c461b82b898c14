"""The requests of chats, read and checked.

Nearly all requests of agents are plain: they have only known keys, their contents are texts, and
they want one answer. `PlainRequest` reads them quickly. vLLM's model of a request reads all other
requests, into the same form.
"""

from functools import lru_cache
from typing import Annotated, Literal, NamedTuple, cast

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from pydantic import TypeAdapter

from turnwise.chat.messages import Conversation
from turnwise.core.json_types import JsonObject
from turnwise.engine.logits_processors import EXTRA_ARG
from turnwise.internals import vllm_server as vllm
from turnwise.internals.pydantic import OF_A_TYPE, bound, odd_value
from turnwise.serving.openai.chat_prompts import BILLING

_TOOLS = 256  # maximum number of cached sets of tools
_TOOLS_BYTES = 65_536  # maximum size of a cached set
_OF_THE_OFFER = ("messages", "tools", "tool_choice")
_Limit = Annotated[int, Meta(ge=1)]
_Count = Annotated[int, Meta(ge=0)]
_Item = str | int | float


class _ToolFunction(Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class _Call(Struct, forbid_unknown_fields=True):
    id: str
    function: _ToolFunction
    type: Literal["function"]


class _System(Struct, tag_field="role", tag="system", forbid_unknown_fields=True):
    content: str


class _User(Struct, tag_field="role", tag="user", forbid_unknown_fields=True):
    content: str


class _Tool(Struct, tag_field="role", tag="tool", forbid_unknown_fields=True):
    content: str
    tool_call_id: str
    name: str | UnsetType = UNSET


class _Assistant(Struct, tag_field="role", tag="assistant", forbid_unknown_fields=True):
    """An answer that a client sends back, perhaps with its null keys and its token ids."""

    content: str | None = None
    tool_calls: list[_Call] | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: None = None
    prompt_token_ids: list[int] | None = None
    generation_token_ids: list[int] | None = None
    generation_log_probs: list[float] | None = None
    weight_versions: list[int] | None = None


class _StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None


class PlainRequest(Struct, forbid_unknown_fields=True):
    """The keys of a plain request, with OpenAI's meaning; None and UNSET mean the default."""

    messages: Annotated[list[_System | _User | _Tool | _Assistant], Meta(min_length=1)]
    model: str | None = None
    user: str | None = None
    tools: list[JsonObject] | None = None  # as the client sent them: vLLM checks them
    tool_choice: Literal["auto"] | None = None
    parallel_tool_calls: bool | None = None
    n: Literal[1] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    max_tokens: _Limit | None = None
    max_completion_tokens: _Limit | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: _Count | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    min_tokens: _Count | UnsetType = UNSET
    ignore_eos: bool | UnsetType = UNSET
    vllm_xargs: dict[str, _Item | list[_Item]] | None = None


SharedParams = dict[tuple[object, ...], vllm.SamplingParams]
"""Sampling parameters by the values of a request on which they depend."""


class ParsedRequest(NamedTuple):
    """A chat's request, read and checked."""

    request: vllm.ChatCompletionRequest
    """The request as vLLM reads it, with the changes that vLLM's answer parser makes; no other chat
    shares it."""
    conversation: Conversation
    variables: JsonObject
    """Variables of the chat template, for vLLM's parser."""
    shared: SharedParams | None = None
    """Parameters that plain requests with the same tools share; None for other requests, whose
    values vLLM checks."""


class _Offer(NamedTuple):
    """A set of tools in the forms that the template and vLLM get."""

    conversation: Conversation
    """The tools as the template gets them, without messages."""
    request: vllm.ChatCompletionRequest
    """vLLM's request with the tools, without messages."""
    variables: JsonObject
    params: SharedParams


class ChatReader:
    """Reads the requests of chats: plain ones in a fraction of a millisecond, all other requests by
    vLLM's model of a request, which takes several milliseconds.

    Args:
        chat: vLLM's service of chats, which has the answer parser.
    """

    def __init__(self, chat: vllm.OpenAIServingChat) -> None:
        self._chat = chat
        parser = chat.parser_cls
        self._always_adjusts = parser is not None and bool(
            parser.always_adjust_request or parser.reasoning_parser_cls
        )
        self._offer = lru_cache(_TOOLS)(self._read_offer)
        self._checked = TypeAdapter[vllm.ChatCompletionRequest](vllm.ChatCompletionRequest)
        bound(self._checked)

    def read(self, tree: JsonObject) -> ParsedRequest | vllm.ChatCompletionRequest:
        """Return a plain request as a `ParsedRequest`, or any other request as vLLM reads it; pass
        the latter to `complete`.

        Raises:
            pydantic.ValidationError: when vLLM refuses the request.
        """
        if (parsed := read_plain(tree)) is not None:
            plain, messages = parsed
            tools = msgspec.json.encode(plain.tools or None)
            offer = self._offer(tools) if len(tools) <= _TOOLS_BYTES else None
            if offer is not None:
                changes = {
                    name: value
                    for name in plain.__struct_fields__
                    if name not in _OF_THE_OFFER
                    and (value := getattr(plain, name)) is not None
                    and value is not UNSET
                }
                request = offer.request.model_copy(update=changes | {"messages": messages})
                offered = offer.conversation
                conversation = Conversation(messages, offered.tools)
                conversation.tools_digest = offered.tools_digest
                return ParsedRequest(request, conversation, offer.variables, offer.params)
        # Clients without tools may send an empty list and a `tool_choice`, which vLLM refuses.
        if (
            tree.keys() & {"tools", "tool_choice"}
            and tree.get("tools") in (None, [])
            and tree.get("tool_choice") in (None, "auto", "none")
        ):
            tree = {k: v for k, v in tree.items() if k not in ("tools", "tool_choice")}
        try:
            return self._checked.validate_python(tree)
        except OF_A_TYPE as error:
            named, said = odd_value(error, tree)
            place = "".join(named)
            why = f"{place}: {said}" if place else said
            raise vllm.VLLMValidationError(why, parameter=place or None) from error

    def complete(
        self, request: vllm.ChatCompletionRequest, conversation: Conversation
    ) -> ParsedRequest:
        """Return vLLM's request with the changes of vLLM's answer parser. Its sampling parameters
        must be complete, because the parser may add a grammar to them."""
        variables = vllm.template_variables(self._chat, request)
        request = self._adjusted(request, variables)
        return ParsedRequest(request, conversation, variables)

    def _adjusted(
        self, request: vllm.ChatCompletionRequest, variables: JsonObject
    ) -> vllm.ChatCompletionRequest:
        if self._always_adjusts or request.tool_choice != "none":
            tokenizer = self._chat.renderer.tokenizer
            parser = vllm.make_parser(self._chat, request, tokenizer, variables)
            return parser.adjust_request(request=request)
        return request

    def _read_offer(self, encoded: bytes) -> _Offer | None:
        """Return a set of tools as vLLM reads it; None if the tools need a grammar, or vLLM refuses
        them."""
        try:
            request = vllm.ChatCompletionRequest(messages=[], tools=msgspec.json.decode(encoded))
            tools = [tool.model_dump() for tool in request.tools or ()] or None
            # Without tools vLLM would remove calls from the text.
            request.tool_choice = "auto" if tools else "none"
            variables = vllm.template_variables(self._chat, request)
            request = self._adjusted(request, variables)
            if request.extract_structured_outputs() is not None:
                return None
        except Exception:  # a client's tools may be anything: vLLM refuses the whole request later
            return None
        request.model_fields_set.clear()  # `read` adds the keys that the client has set
        return _Offer(Conversation(tools=tools), request, variables, {})


def read_plain(tree: object) -> tuple[PlainRequest, list[JsonObject]] | None:
    """Return a plain request and its messages as the client sent them; None if the request is not
    plain."""
    try:
        request = msgspec.convert(tree, PlainRequest)
    except (msgspec.MsgspecError, RecursionError):
        return None
    first = request.messages[0]
    if (
        (isinstance(first, _System) and first.content.startswith(BILLING))
        or request.logprobs
        or (request.stream_options and not request.stream)
        or request.parallel_tool_calls is False
        or EXTRA_ARG in (request.vllm_xargs or ())
    ):
        return None
    return request, cast(JsonObject, tree)["messages"]
