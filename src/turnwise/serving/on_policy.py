"""How a request samples: by the configuration where it says nothing, and in a training session
only so, because the trainer takes its tokens to be from there.

Requests are vLLM's, of Chat Completions, Completions or Responses. What a sampled request of any
API still lacks (`min_tokens`, `ignore_eos`) is filled in when its sampling parameters are made.
"""

from typing import Any

from turnwise.config import SamplingConfig
from turnwise.engine.logits_processors import EXTRA_ARG, plain_calls, written
from turnwise.errors import InputError

MAX_CHOICES = 128
"""Completions of one prompt that one request may ask for."""
MAX_COMPLETIONS = 1_024
"""Completions of all its prompts together."""
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_DISTRIBUTION = ("temperature", "top_p", "top_k")
_NEUTRAL: dict[str, Any] = {
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


class RefusedParameter(InputError):
    """A request's parameter cannot be served; the message says why, and what to do."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


def bound_choices(request: Any) -> None:
    """Refuse a request for too many completions.

    Raises:
        RefusedParameter: when it asks for more than are served at once.
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


def choose_processors(request: Any, sampling: SamplingConfig, allowed: str | None) -> None:
    """Put the logits processors that a request names, or the configured ones, where the engine
    looks for them.

    Args:
        allowed: `engine.logits_processors_allowed`.

    Raises:
        RefusedParameter: when one of them is not allowed.
    """
    if "vllm_xargs" not in type(request).model_fields:
        return
    arguments = dict(request.vllm_xargs or {})
    if not isinstance(arguments.pop(EXTRA_ARG, {}), dict):  # ours is one, clients cannot send any
        raise RefusedParameter("vllm_xargs", f"vllm_xargs.{EXTRA_ARG} is not a client's to set")
    if not _says(request, "vllm_xargs"):
        arguments = dict(sampling.logits_processor_args)
    chosen = (request.model_extra or {}).get("logits_processors")
    try:
        calls = plain_calls(written(sampling) if chosen is None else chosen, allowed)
    except InputError as error:
        raise RefusedParameter("logits_processors", str(error)) from error
    if calls:
        arguments[EXTRA_ARG] = {"processors": calls}
    request.vllm_xargs = arguments or None


def give_defaults(request: Any, sampling: SamplingConfig, max_length: int) -> None:
    """Give a request the configured sampling where it says nothing; `n` stays OpenAI's 1.

    Args:
        max_length: The context's, in tokens.
    """
    fields = type(request).model_fields
    for name in (*_DISTRIBUTION, "stop", "stop_token_ids"):
        if name in fields and not _says(request, name):
            setattr(request, name, getattr(sampling, name))
    limits = [name for name in _LIMITS if name in fields]
    if limits and not any(_says(request, name) for name in limits):
        for name in limits:
            setattr(request, name, min(sampling.max_tokens, max_length))


def _says(request: Any, name: str) -> bool:
    return name in request.model_fields_set and getattr(request, name) not in (None, [])


def keep_on_policy(request: Any, sampling: SamplingConfig) -> None:
    """Refuse what would make the tokens of a training session off-policy.

    Raises:
        RefusedParameter: naming the value.
    """
    said = request.model_fields_set

    def refuse(name: str, advice: str) -> None:
        raise RefusedParameter(
            name,
            f"{name}={getattr(request, name)!r} would make the tokens of this training session "
            f"off-policy: {advice}",
        )

    for name in _DISTRIBUTION:
        wanted = getattr(sampling, name)
        if name in said and getattr(request, name) not in (None, wanted):
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
        if name in said and getattr(request, name) not in (None, wanted):
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
