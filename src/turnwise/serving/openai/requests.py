"""Requests of sessions: one on its way to the engine and back, and the parameters it may have.

`read` returns a plain chat: all its keys, and those of its messages, are among those of the classes
below. `settle` sets the parameters of vLLM's requests, of Chat Completions, Completions or
Responses, with the configuration's values as defaults. Requests of a training session may not
deviate from the configuration, because the trainer assumes that their tokens were sampled as
configured.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn, cast

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from turnwise.chat.messages import Answer, Conversation
from turnwise.chat.prompts import NextPrompt, RefusedParameter
from turnwise.chat.session import Session
from turnwise.chat.session_store import SessionStore
from turnwise.config import Config, SamplingConfig
from turnwise.core.json_types import JsonObject
from turnwise.engine.logits_processors import EXTRA_ARG, plain_calls, written
from turnwise.engine.protocol import Completion
from turnwise.errors import InputError

if TYPE_CHECKING:
    from turnwise.internals.vllm_server import SamplingRequest

MAX_CHOICES = 128
MAX_COMPLETIONS = 1_024
ECHO = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "weight_versions")
"""Keys of an answer's message by which a client may send its ids back."""
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_DISTRIBUTION = ("temperature", "top_p", "top_k")
_OWN_NAMES = (*_DISTRIBUTION, "min_tokens", "ignore_eos")
"""Sampling parameters that the configuration calls by the same names."""
_NEUTRAL: dict[str, object] = {
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "repetition_detection": None,
    "watermarking": None,
    "logit_bias": None,
    "bad_words": [],
    "allowed_token_ids": None,
    "structured_outputs": None,
    "use_beam_search": False,
    "thinking_token_budget": None,
}

ChoiceKey = tuple[str, int]
"""Identity of one completion of a request: vLLM's id of its prompt, and the index of the choice."""
_Limit = Annotated[int, Meta(ge=1)]
_Count = Annotated[int, Meta(ge=0)]
_Item = str | int | float


@dataclass(slots=True)
class RequestContext:
    """One request on its way to the engine and back."""

    session: Session
    held: ExitStack
    """Closed at the end of the request."""
    request: "SamplingRequest | None" = None
    """The request as parsed by vLLM; None before rendering."""
    asked: Conversation = field(default_factory=Conversation)
    """Messages and tools of a chat; empty for other requests."""
    prompt: NextPrompt = field(default_factory=lambda: NextPrompt(None))
    finished: dict[ChoiceKey, Completion] = field(default_factory=dict)
    texts: dict[ChoiceKey, str] = field(default_factory=dict)
    undelivered: list[Callable[[], None]] = field(default_factory=list)
    """For each completion that the client has not got, a function that records it as a turn."""
    answers: dict[int, Answer] = field(default_factory=dict)
    """Answers as the client got them, by the index; of streamed chats only those with tools."""
    adapter: str = ""
    began: float = field(default_factory=time.time)
    """Time when the request came, in seconds since the epoch."""

    def within(self, prompt: Sequence[int], most: int) -> int:
        """Return how many of `most` tokens may follow a prompt; 0 or less if none may."""
        room = self.session.room(prompt, self.prompt.fork_reason)
        return most if room is None else min(most, room)

    def deliver(self) -> None:
        """Record the finished completions: the next bytes that the client gets have their end.

        A client can leave as soon as it has read these, or send the next request.
        """
        for record in self.undelivered:
            record()
        self.undelivered.clear()


CURRENT: ContextVar[RequestContext | None] = ContextVar("request", default=None)
"""The request that the current task serves; None outside requests that sample."""


@contextmanager
def serving(
    store: SessionStore, name: str | None, previous: str | None, child: str | None = None
) -> Iterator[RequestContext]:
    """Hold the session of a request, and make the request `CURRENT`, until it is answered.

    Completions that were not delivered then are lost. Raises as `SessionStore.request` does.
    """
    with ExitStack() as held:
        context = RequestContext(held.enter_context(store.request(name, previous, child)), held)
        token = CURRENT.set(context)
        try:
            yield context
        finally:
            for _ in context.undelivered:
                context.session.lose_turn()
            context.session.lost_turns += len(context.undelivered)
            context.undelivered.clear()
            CURRENT.reset(token)


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


class PlainRequest(Struct, forbid_unknown_fields=True):
    """The keys of a plain request, with OpenAI's meaning; None and UNSET stand for the default."""

    messages: Annotated[list[_System | _User | _Tool | _Assistant], Meta(min_length=1)]
    model: str | None = None
    user: str | None = None
    tools: list[JsonObject] | None = None
    """As the client sent them: vLLM checks them."""
    tool_choice: Literal["auto"] | None = None
    parallel_tool_calls: bool | None = None
    n: Literal[1] | None = None
    stream: bool | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    max_tokens: _Limit | None = None
    max_completion_tokens: _Limit | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: _Count | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    min_tokens: _Count | UnsetType = UNSET
    ignore_eos: bool | UnsetType = UNSET
    vllm_xargs: dict[str, _Item | list[_Item]] | None = None

    @property
    def sampling(self) -> JsonObject:
        """The sampling parameters that the client set, but for the limit of tokens."""
        values = {name: getattr(self, name) for name in _OWN_NAMES}
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
        request.stream
        or request.logprobs
        or request.parallel_tool_calls is False
        or EXTRA_ARG in (request.vllm_xargs or ())
    ):
        return None
    return request, cast(JsonObject, tree)["messages"]


def without_empty_tools(tree: object) -> object:
    """Return a request without an empty list of tools and the choice among them.

    Clients without tools send both; vLLM refuses them.
    """
    if not isinstance(tree, dict) or not tree.keys() & {"tools", "tool_choice"}:
        return tree
    if tree.get("tools") not in (None, []) or tree.get("tool_choice") not in (None, "auto", "none"):
        return tree
    return {key: value for key, value in tree.items() if key not in ("tools", "tool_choice")}


def texts(messages: Sequence[JsonObject]) -> list[JsonObject] | None:
    """Return messages of nothing but text, which every template renders; None for others."""
    shown = [
        {key: value for key, value in message.items() if value is not None and key not in ECHO}
        for message in messages
    ]
    return shown if all(message.keys() == {"role", "content"} for message in shown) else None


def settle(request: "SamplingRequest", own: SamplingConfig | None, config: Config) -> None:
    """Set the sampling parameters of a request: those that it does not set are the configured ones.

    The default of `n` remains 1, as in OpenAI's API. Limits of tokens beyond the context are
    lowered to it; vLLM lowers them further to what the prompt leaves. A parameter that cannot be
    served is refused; `own` is the sampling of a training session.
    """
    n, listed = getattr(request, "n", None) or 1, getattr(request, "prompt", None)
    prompts = 1
    if isinstance(listed, list) and listed and not isinstance(listed[0], int):
        prompts = len(listed)
    if n > MAX_CHOICES:
        raise RefusedParameter("n", f"n={n} is more than {MAX_CHOICES}: ask several times")
    if n * prompts > MAX_COMPLETIONS:
        raise RefusedParameter(
            "prompt",
            f"{prompts} prompts with n={n} are more than {MAX_COMPLETIONS} completions: ask "
            "several times",
        )
    if own is not None:
        _keep_on_policy(request, own)
    sampling, fields = own or config.sampling, type(request).model_fields
    if "vllm_xargs" in fields:  # logits processors move to where the engine expects them
        arguments = dict(request.vllm_xargs or {})
        if not isinstance(arguments.pop(EXTRA_ARG, {}), dict):  # only ours is a dictionary
            raise RefusedParameter("vllm_xargs", f"vllm_xargs.{EXTRA_ARG} cannot be set by clients")
        if not _sets(request, "vllm_xargs"):
            arguments = dict(sampling.logits_processor_args)
        chosen = (request.model_extra or {}).get("logits_processors")
        chosen = written(sampling) if chosen is None else chosen
        try:
            calls = plain_calls(chosen, config.engine.logits_processors_allowed)
        except InputError as error:
            raise RefusedParameter("logits_processors", str(error)) from error
        if calls:
            arguments[EXTRA_ARG] = {"processors": calls}
        request.vllm_xargs = arguments or None
    for name in (*_DISTRIBUTION, "stop", "stop_token_ids"):
        if name in fields and not _sets(request, name):
            setattr(request, name, getattr(sampling, name))
    limits = [name for name in _LIMITS if name in fields]
    given = {name: getattr(request, name) for name in limits if _sets(request, name)}
    for name, limit in (given or dict.fromkeys(limits, sampling.max_tokens)).items():
        setattr(request, name, min(limit, config.model.max_length))


def _sets(request: "SamplingRequest", name: str) -> bool:
    return name in request.model_fields_set and getattr(request, name) not in (None, [])


def _keep_on_policy(request: "SamplingRequest", sampling: SamplingConfig) -> None:
    """Refuse parameters that would make the tokens of a training session off-policy."""

    def refuse(name: str, advice: str) -> NoReturn:
        raise RefusedParameter(
            name,
            f"{name}={getattr(request, name)!r} would make the tokens of this training session "
            f"off-policy: {advice}",
        )

    wanted: dict[str, object] = {
        "logits_processors": written(sampling),
        "vllm_xargs": sampling.logits_processor_args or None,
        **{name: getattr(sampling, name) for name in _OWN_NAMES},
        **_NEUTRAL,
    }
    for name, value in wanted.items():
        if name in request.model_fields_set and getattr(request, name) not in (None, value):
            shown = f"{value:g}" if isinstance(value, float) else repr(value)
            refuse(name, "leave it out" + ("" if value is None else f", or set it to {shown}"))
    if getattr(request, "parallel_tool_calls", True) is False and request.tools:
        refuse("parallel_tool_calls", "a grammar changes what is sampled; leave it out")
    for name in ("response_format", "text"):  # the second is Responses'
        grammar = getattr(request, name, None)
        grammar = getattr(grammar, "format", grammar)
        if getattr(grammar, "type", "text") != "text":
            refuse(name, "a grammar changes what is sampled; leave it out")
    if getattr(request, "tools", None) and request.tool_choice not in (None, "auto", "none"):
        refuse("tool_choice", "a forced call changes what is sampled; use auto")
