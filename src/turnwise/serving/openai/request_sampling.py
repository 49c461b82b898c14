"""The sampling parameters that requests may have.

The configuration's values are the defaults. `agent_sampling` decides which of them requests of a
training session may change.
"""

from typing import TYPE_CHECKING

from turnwise.chat.prompts import RefusedParameter
from turnwise.chat.session import Session, TurnSampling
from turnwise.config import SamplingConfig
from turnwise.core.optional import Foreign
from turnwise.engine.logits_processors import EXTRA_ARG, plain_calls, written
from turnwise.errors import InputError
from turnwise.serving.openai.agent_sampling import DISTRIBUTION, STRICT, AgentSampling, Decision

if TYPE_CHECKING:
    from turnwise.internals.vllm_server import SamplingRequest

MAX_CHOICES = 128
MAX_COMPLETIONS = 1_024
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""Parameters that limit the number of tokens in an answer, in order of precedence: the first one
that a request sets applies."""
OWN_NAMES = (*DISTRIBUTION, "min_tokens", "ignore_eos")
"""Sampling parameters that have the same names in requests and in the configuration."""
CONFIGURED = (*DISTRIBUTION, "stop", "stop_token_ids")
"""Parameters that get the configured value if a request does not set them."""
_NEUTRAL: dict[str, object] = {
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


class RequestSampling:
    """Completes and checks the sampling parameters of requests.

    Args:
        sampling: The configured parameters, for sessions without their own.
        max_length: Length of the context in tokens.
        processors: Pattern of the logits processors that clients may choose; None allows no
            processors.
        exact: As in `AgentSampling`.
    """

    def __init__(
        self, sampling: SamplingConfig, *, max_length: int, processors: str | None, exact: bool
    ) -> None:
        self._sampling, self._max_length, self._processors = sampling, max_length, processors
        self._agents = AgentSampling(exact=exact)

    def complete(self, request: "SamplingRequest", session: Session) -> TurnSampling:
        """Complete the sampling parameters of a request; in a training session, return the
        parameters that the turn has of its own.

        Parameters that the request does not set, except `n`, get the configured values. Token
        limits are lowered to the context length; vLLM lowers them further to the tokens that the
        prompt leaves. Parameters that cannot be served are refused.
        """
        # Reading the model's attributes takes ten times as long, and warns of deprecated
        # parameters.
        own, values, given = session.sampling, request.__dict__, request.model_fields_set
        n, listed = values.get("n") or 1, values.get("prompt")
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
        decision = Decision()
        if own is not None:
            decision = self._agents.decide(_asked(request, own), session)
            for name in decision.replaced:
                _replace(request, name)
        sampling = own or self._sampling

        def sets(name: str) -> bool:
            return name in given and values[name] not in (None, [])

        if "vllm_xargs" in values:  # logits processors move to where the engine expects them
            arguments = dict(values["vllm_xargs"] or {})
            if not isinstance(arguments.pop(EXTRA_ARG, {}), dict):  # only ours is a dictionary
                raise RefusedParameter(
                    "vllm_xargs", f"vllm_xargs.{EXTRA_ARG} cannot be set by clients"
                )
            if not sets("vllm_xargs"):
                arguments = dict(sampling.logits_processor_args)
            chosen = (request.model_extra or {}).get("logits_processors")
            chosen = written(sampling) if chosen is None else chosen
            try:
                calls = plain_calls(chosen, self._processors)
            except InputError as error:
                raise RefusedParameter("logits_processors", str(error)) from error
            if calls:
                arguments[EXTRA_ARG] = {"processors": calls}
            values["vllm_xargs"] = arguments or None
        for name in CONFIGURED:
            if name in values and not sets(name):
                values[name] = getattr(sampling, name)
        limits = [name for name in LIMITS if name in values]
        asked = {name: values[name] for name in limits if sets(name)}
        for name, limit in (asked or dict.fromkeys(limits, sampling.max_tokens)).items():
            values[name] = min(limit, self._max_length)
        return decision.turn


def _asked(request: "SamplingRequest", sampling: SamplingConfig) -> dict[str, object]:
    """Return the parameters of a request whose values differ from `sampling`."""
    wanted: dict[str, object] = {
        "logits_processors": written(sampling),
        "vllm_xargs": sampling.logits_processor_args or None,
        **{name: getattr(sampling, name) for name in OWN_NAMES},
        **_NEUTRAL,
    }
    asked = {
        name: value
        for name, wants in wanted.items()
        if name in request.model_fields_set
        and (value := getattr(request, name)) not in (None, wants)
    }
    if asked.get("top_k") == -1:  # all tokens, like 0
        asked["top_k"] = 0
        if sampling.top_k == 0:
            del asked["top_k"]
    for name in ("response_format", "text"):  # `text` is the name in Responses
        grammar = getattr(request, name, None)
        grammar = getattr(grammar, "format", grammar)
        if getattr(grammar, "type", "text") != "text":
            asked[name] = grammar
    if tools := getattr(request, "tools", None):
        if getattr(request, "parallel_tool_calls", True) is False:
            asked["parallel_tool_calls"] = False
        if request.tool_choice not in (None, "auto", "none"):
            asked["tool_choice"] = request.tool_choice
        if any(getattr(_function_of(tool), "strict", None) for tool in tools):
            asked[STRICT] = True
    return asked


def _function_of(tool: Foreign) -> Foreign:
    """Return the object with the attribute `strict`: the tool's function, or in Responses the tool
    itself."""
    return getattr(tool, "function", tool)


def _replace(request: "SamplingRequest", name: str) -> None:
    """Remove a parameter from a request, so that the configured value applies."""
    if name == STRICT:
        for tool in request.tools or ():
            if getattr(_function_of(tool), "strict", None):
                _function_of(tool).strict = False
        return
    fields = type(request).model_fields
    if name not in fields:
        (request.model_extra or {}).pop(name, None)
    else:
        default = fields[name].get_default(call_default_factory=True)
        setattr(request, name, "auto" if name == "tool_choice" else default)
    if name != "tool_choice":
        request.model_fields_set.discard(name)
