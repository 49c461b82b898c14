"""Sampling parameters of requests, with the configuration's values as defaults.

Requests of a training session may not deviate from the configuration, because the trainer assumes
that their tokens were sampled as configured. Requests are vLLM's, of Chat Completions, Completions
or Responses; `EngineClient` fills in the parameters that not all of them have.
"""

from typing import TYPE_CHECKING

from turnwise.chat.prompts import RefusedParameter
from turnwise.config import SamplingConfig
from turnwise.engine.logits_processors import EXTRA_ARG, plain_calls, written
from turnwise.errors import InputError

if TYPE_CHECKING:
    from turnwise.serving.openai.vllm_api import SamplingRequest

MAX_CHOICES = 128
"""Maximum number of completions of one prompt in one request."""
MAX_COMPLETIONS = 1_024
"""Maximum number of completions of all prompts of one request."""
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_DISTRIBUTION = ("temperature", "top_p", "top_k")
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


def bound_choices(request: "SamplingRequest") -> None:
    """Refuse a request for too many completions.

    Raises:
        RefusedParameter: when the request asks for more than the maximum.

    Example:
        >>> bound_choices(ChatCompletionRequest(messages=[], n=8))
    """
    n = getattr(request, "n", None) or 1
    prompt = getattr(request, "prompt", None)
    listed = prompt if isinstance(prompt, list) else []
    prompts = len(listed) if listed and not isinstance(listed[0], int) else 1
    if n > MAX_CHOICES:
        raise RefusedParameter("n", f"n={n} is more than {MAX_CHOICES}: ask several times")
    if n * prompts > MAX_COMPLETIONS:
        raise RefusedParameter(
            "prompt",
            f"{prompts} prompts with n={n} are more than {MAX_COMPLETIONS} completions: ask "
            "several times",
        )


def choose_processors(
    request: "SamplingRequest", sampling: SamplingConfig, allowed: str | None
) -> None:
    """Move a request's logits processors, or the configured ones, to where the engine expects them.

    Args:
        allowed: `engine.logits_processors_allowed`.

    Raises:
        RefusedParameter: when a processor is not allowed.
    """
    if "vllm_xargs" not in type(request).model_fields:
        return
    arguments = dict(request.vllm_xargs or {})
    if not isinstance(arguments.pop(EXTRA_ARG, {}), dict):  # only our own value is a dictionary
        raise RefusedParameter("vllm_xargs", f"vllm_xargs.{EXTRA_ARG} cannot be set by clients")
    if not _sets(request, "vllm_xargs"):
        arguments = dict(sampling.logits_processor_args)
    chosen = (request.model_extra or {}).get("logits_processors")
    try:
        calls = plain_calls(written(sampling) if chosen is None else chosen, allowed)
    except InputError as error:
        raise RefusedParameter("logits_processors", str(error)) from error
    if calls:
        arguments[EXTRA_ARG] = {"processors": calls}
    request.vllm_xargs = arguments or None


def give_defaults(request: "SamplingRequest", sampling: SamplingConfig, max_length: int) -> None:
    """Set each unset parameter of a request to the configured value.

    The default of `n` remains 1, as in OpenAI's API. Limits of tokens beyond the context are
    lowered to it; vLLM lowers them further to what the prompt leaves.

    Args:
        max_length: Length of the context, in tokens.
    """
    fields = type(request).model_fields
    for name in (*_DISTRIBUTION, "stop", "stop_token_ids"):
        if name in fields and not _sets(request, name):
            setattr(request, name, getattr(sampling, name))
    limits = [name for name in _LIMITS if name in fields]
    given = {name: getattr(request, name) for name in limits if _sets(request, name)}
    for name, limit in (given or dict.fromkeys(limits, sampling.max_tokens)).items():
        setattr(request, name, min(limit, max_length))


def _sets(request: "SamplingRequest", name: str) -> bool:
    return name in request.model_fields_set and getattr(request, name) not in (None, [])


def keep_on_policy(request: "SamplingRequest", sampling: SamplingConfig) -> None:
    """Refuse parameters that would make the tokens of a training session off-policy.

    Raises:
        RefusedParameter: naming the parameter and its value.
    """
    written_fields = request.model_fields_set

    def refuse(name: str, advice: str) -> None:
        raise RefusedParameter(
            name,
            f"{name}={getattr(request, name)!r} would make the tokens of this training session "
            f"off-policy: {advice}",
        )

    for name in _DISTRIBUTION:
        wanted = getattr(sampling, name)
        if name in written_fields and getattr(request, name) not in (None, wanted):
            refuse(name, f"leave it out, or set it to {wanted:g}")
    for name, neutral in _NEUTRAL.items():
        if getattr(request, name, neutral) not in (None, neutral):
            advice = "" if neutral is None else f", or set it to {neutral!r}"
            refuse(name, f"leave it out{advice}")
    ours = {
        "min_tokens": sampling.min_tokens,
        "ignore_eos": sampling.ignore_eos,
        "vllm_xargs": sampling.logits_processor_args or None,
    }
    if (request.model_extra or {}).get("logits_processors") not in (None, written(sampling)):
        raise RefusedParameter(
            "logits_processors",
            "logits_processors would make the tokens of this training session off-policy: leave "
            "it out",
        )
    for name, wanted in ours.items():
        if name in written_fields and getattr(request, name) not in (None, wanted):
            refuse(name, "leave it out")
    if getattr(request, "parallel_tool_calls", True) is False and request.tools:
        refuse("parallel_tool_calls", "a grammar changes what is sampled; leave it out")
    for name in ("response_format", "text"):  # the second is Responses'
        wanted = getattr(request, name, None)
        wanted = getattr(wanted, "format", wanted)
        if getattr(wanted, "type", "text") != "text":
            refuse(name, "a grammar changes what is sampled; leave it out")
    if getattr(request, "tools", None) and request.tool_choice not in (None, "auto", "none"):
        refuse("tool_choice", "a forced call changes what is sampled; use auto")
