"""Chat requests that need nothing of vLLM's application: known keys, plain texts, one answer."""

from typing import Annotated, Literal, cast

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from turnwise.core.json_types import JsonObject
from turnwise.engine.logits_processors import EXTRA_ARG
from turnwise.serving.openai.requests import OWN_NAMES

_Limit = Annotated[int, Meta(ge=1)]
_Count = Annotated[int, Meta(ge=0)]
_Item = str | int | float


class _Function(Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class _Call(Struct, forbid_unknown_fields=True):
    id: str
    function: _Function
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
    """An answer; clients send keys without a value back as well, and may send its ids."""

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
    """The keys of a plain request, with OpenAI's meaning; None and UNSET stand for the default."""

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

    @property
    def sampling(self) -> JsonObject:
        """The sampling parameters that the client set, but for the limit of tokens."""
        values = {name: getattr(self, name) for name in OWN_NAMES}
        if self.vllm_xargs:
            values["logits_processor_args"] = self.vllm_xargs
        return {name: value for name, value in values.items() if value not in (None, UNSET)}


def read(tree: object) -> tuple[PlainRequest, list[JsonObject]] | None:
    """Return a plain request and its messages as the client sent them; None for others."""
    try:
        request = msgspec.convert(tree, PlainRequest)
    except (msgspec.MsgspecError, RecursionError):
        return None
    if (
        request.logprobs
        or (request.return_token_ids if request.stream else request.stream_options)
        or request.parallel_tool_calls is False
        or EXTRA_ARG in (request.vllm_xargs or ())
    ):
        return None
    return request, cast(JsonObject, tree)["messages"]
