"""The run's engines with the methods `generate` and `chat` of vLLM's `LLM`, for batch samplers.

All calls are recorded. If a conversation continues the answer of an earlier call, its prompt keeps
the sampled ids.
"""

import asyncio
import itertools
import json
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from turnwise.chat.images import read_parts
from turnwise.config import SamplingConfig
from turnwise.core.aio import together
from turnwise.core.json_types import Args, JsonObject, Kwargs
from turnwise.core.optional import Foreign
from turnwise.core.watchdog import waiting
from turnwise.engine.protocol import Completion, Request, Route, generate
from turnwise.errors import InputError, TrajectoryError, TurnwiseError
from turnwise.rollouts.agent_loop import RolloutContext, stable_seed
from turnwise.rollouts.environment import shown
from turnwise.trajectory import Message, Prompt

if TYPE_CHECKING:
    from turnwise.internals.vllm import RequestOutput, SamplingParams

KEY = "rollout.sampler"
_CONFIGURED = ("temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos")
_FIXED = (
    *(*_CONFIGURED, "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("bad_words", "allowed_token_ids", "structured_outputs", "extra_args", "prompt_logprobs"),
)
"""vLLM's parameters that a sampler must not change, because the trainer or the record of calls
assumes the configured values."""
_DEFAULTS = {"add_generation_prompt": True, "continue_final_message": False}
"""Values of vLLM's arguments that are accepted, because they are what this class does anyway."""
_Prompt = tuple[str | list[int], list[Message]]
"""A text or ids, and a conversation; one of the two is empty."""
_Wanted = tuple[SamplingConfig, list[int | None]]
"""Parameters of a prompt's requests, and the seed of each request."""


@dataclass(slots=True, eq=False)
class SampledCall:
    """One request to the engines, and its completion."""

    request: Request
    completion: Completion
    times: tuple[float, float]
    """Beginning and end of the request, in seconds since the epoch."""
    messages: list[Message]
    """The conversation that is the prompt; empty if the prompt was a text or ids."""

    @property
    def prompt(self) -> Prompt:
        return self.request.prompt


class LLM:
    """The engines of a run with the methods `generate` and `chat` of vLLM's `LLM`, for samplers.

    Both methods block, so call them in a thread. A plain sampler already runs in a thread; an async
    sampler uses `asyncio.to_thread`. Several calls may run at once.

    Example:
        outputs = llm.generate(["2 + 2 =", [3, 4, 5]], sampling_params)
        outputs[0].outputs[0].text, outputs[1].prompt_token_ids
    """

    def __init__(self, contexts: Sequence[RolloutContext], own: "SamplingParams") -> None:
        self.calls: list[SampledCall] = []
        """All requests that have been answered."""
        self._contexts = contexts
        self._context = contexts[0]
        self._own = own
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._running: set[asyncio.Task[object]] = set()
        self._closed = False
        self._answered: dict[str, deque[SampledCall]] = defaultdict(deque)
        """Calls by a key of their conversation, including the answer."""

    def generate(
        self,
        prompts: object = None,
        sampling_params: "SamplingParams | Sequence[SamplingParams] | None" = None,
        prompt_token_ids: object = None,
        **others: object,
    ) -> "list[RequestOutput]":
        """Sample completions.

        Args:
            prompts: One prompt, or a list of prompts. A prompt is a text, a list of ids, a
                conversation, which the chat template renders, `{"prompt": text}` or
                `{"prompt_token_ids": ids}`.
            sampling_params: For all prompts, or a list with one for each prompt; None means the
                configured parameters.
            prompt_token_ids: The ids of one prompt or of several, instead of `prompts`, as older
                versions of vLLM take them.
            others: vLLM's further arguments. Only values that have no effect are allowed, because
                the run's configuration decides.

        Returns:
            An output for each prompt. A prompt that leaves no room for an answer gets an empty
            output with finish reason `length`.

        Raises:
            InputError: when arguments would change the distribution of the tokens.
            EngineError: when the engines fail.
        """
        if prompts is not None and prompt_token_ids is not None:
            raise InputError(f"{KEY}: llm takes prompts or prompt_token_ids, not both")
        given = prompts if prompt_token_ids is None else prompt_token_ids
        return self._sample(_prompts_of(given), sampling_params, others)

    def chat(
        self,
        messages: object,
        sampling_params: "SamplingParams | Sequence[SamplingParams] | None" = None,
        use_tqdm: object = False,
        *,
        tools: list[JsonObject] | None = None,
        **others: object,
    ) -> "list[RequestOutput]":
        """Answer one list of messages, or a list of such lists; in all else like `generate`."""
        prompts = _prompts_of(messages)
        if not all(conversation for _, conversation in prompts):
            raise InputError(f"{KEY}: llm.chat takes lists of messages")
        return self._sample(prompts, sampling_params, others, tools)

    def get_tokenizer(self) -> Foreign:
        """Return the model's tokenizer."""
        return self._context.template.tokenizer

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Args = (), kwargs: Kwargs = None
    ) -> list[Foreign]:
        """Call a method of the workers of all engines; see `VllmEngine.collective_rpc`."""
        engine: Foreign = self._context.engine
        call = engine.collective_rpc(method, timeout, args, kwargs)
        answers: list[Foreign] = asyncio.run_coroutine_threadsafe(call, self._loop).result()
        return answers

    def close(self) -> None:
        """Cancel calls that still run; call this when the sampler has returned, or missed its
        deadline."""
        self._closed = True
        for task in self._running:
            task.cancel()

    def _sample(
        self,
        prompts: list[_Prompt],
        given: Foreign,
        others: Mapping[str, object],
        tools: list[JsonObject] | None = None,
    ) -> "list[RequestOutput]":
        """Send prompts to the engines, and wait for all answers, in the sampler's thread."""
        for name, value in others.items():
            if value is not None and name != "use_tqdm" and value != _DEFAULTS.get(name):
                raise InputError(f"{KEY}: llm takes no {name}: the run's configuration decides")
        each = isinstance(given, Sequence)
        params = list(given) if each else [self._own if given is None else given] * len(prompts)
        if len(params) != len(prompts):
            raise InputError(f"{KEY}: {len(params)} sampling parameters for {len(prompts)} prompts")
        asking = self._ask(prompts, list(map(self._wanted, params)), tools)
        answers = asyncio.run_coroutine_threadsafe(asking, self._loop).result()
        return list(map(self._output, answers, params))

    def _wanted(self, params: Foreign) -> _Wanted:
        """Return the parameters and seeds of requests from vLLM's parameters; raise InputError if
        they would make the tokens off-policy."""
        if not isinstance(params, type(self._own)):
            raise InputError(f"{KEY}: llm takes vLLM's SamplingParams, not {shown(params)}")
        for name in _FIXED:
            value, own = getattr(params, name, None), getattr(self._own, name, None)
            if value != own:
                raise InputError(
                    f"{KEY}: {name}={shown(value)} would make the tokens off-policy: it is "
                    f"{shown(own)} in the configuration's sampling, which the trainer assumes"
                )
        sampling = self._context.sampling
        max_tokens = params.max_tokens or self._context.max_length
        changes = {
            "max_tokens": max_tokens,
            "min_tokens": min(sampling.min_tokens, max_tokens),
            "stop": list(params.stop or ()),
            "stop_token_ids": list(params.stop_token_ids or ()),
        }
        numbers, seed = range(params.n or 1), params.seed
        seeds = [None if seed is None else seed + number for number in numbers]
        return sampling.model_copy(update=changes), seeds

    async def _ask(
        self, prompts: list[_Prompt], wanted: list[_Wanted], tools: list[JsonObject] | None
    ) -> list[list[SampledCall]]:
        if (task := asyncio.current_task()) is None or self._closed:
            raise TurnwiseError("the sampler's batch has ended")
        self._running.add(task)
        with ExitStack() as held:
            held.callback(self._running.discard, task)
            for context in self._contexts:  # engine.request_timeout limits the wait
                held.enter_context(context.timed("generate"))
            return await together(map(partial(self._answer, tools), prompts, wanted))

    async def _answer(
        self, tools: list[JsonObject] | None, prompt: _Prompt, wanted: _Wanted
    ) -> list[SampledCall]:
        """Sample the answers to one prompt."""
        numbers = list(itertools.islice(self._numbers, len(wanted[1])))
        (given, messages), (sampling, seeds) = prompt, wanted
        context, session = self._context, ""
        if messages:
            ids, session = await self._continued(messages, tools)
        elif isinstance(given, str):
            ids = Prompt(await context.encode(given, add_special_tokens=True))
        else:
            ids = Prompt(given)

        async def complete(number: int, seed: int | None) -> SampledCall:
            asked, name = time.time(), f"{context.request_id}-batch-{number}"
            if seed is None and context.seed is not None:
                seed = stable_seed(context.seed, number)
            room, completion = context.max_length - len(ids), Completion([], [], [], "length")
            route = Route(session=session or name)
            request = Request(ids, sampling.within(room), name, seed, route)
            if room > 0:
                with waiting(f"request {name}", "answer"):
                    completion = await generate(context.engine, request)
            if completion.finish_reason == "abort":
                raise TrajectoryError("engine_abort", f"{name} was aborted by the engine")
            call = SampledCall(request, completion, (asked, time.time()), messages)
            self.calls.append(call)
            return call

        return await together(map(complete, numbers, seeds))

    async def _continued(
        self, messages: list[Message], tools: list[JsonObject] | None
    ) -> tuple[Prompt, str]:
        """Return a conversation's prompt, and the name of the session that it continues ("" if it
        does not continue one)."""
        context = self._context
        for end in range(len(messages) - 1, 0, -1):
            if messages[end - 1].get("role") != "assistant":
                continue
            if known := self._answered.get(_key(messages[:end])):
                call = known[0]
                known.rotate(-1)  # equal answers take turns
                turn = call.prompt, call.completion.token_ids, messages[end:]
                ids = await context.next_prompt(*turn, tools=tools, conversation=messages)
                return ids, call.request.route.session
        return await context.first_prompt(messages, tools=tools), ""

    def _output(self, calls: list[SampledCall], params: Foreign) -> "RequestOutput":
        """Return the calls of one prompt as vLLM's output, with copies that the user may change."""
        from turnwise.internals import vllm  # seconds to import

        template, first = self._context.template, calls[0]
        outputs: list[Foreign] = []
        for index, call in enumerate(calls):
            done, ids = call.completion, list(call.completion.token_ids)
            skip, decode = params.skip_special_tokens, template.tokenizer.decode
            decoded = decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            stops = [(decoded.index(stop), stop) for stop in params.stop or () if stop in decoded]
            end, stopped = min(stops, default=(len(decoded), None))
            text = decoded[: end + len(stopped or "") * params.include_stop_str_in_output]
            pairs = zip(ids, done.logprobs, strict=True)
            rows = None if params.logprobs is None else [{id: vllm.Logprob(p)} for id, p in pairs]
            output = vllm.CompletionOutput(index, text, ids, sum(done.logprobs), rows)
            output.finish_reason, output.stop_reason = done.finish_reason, stopped
            outputs.append(output)
            if call.messages:
                answer = {"role": "assistant", "content": text}
                self._answered[_key([*call.messages, answer])].append(call)
        prompt = template.decode_all(first.prompt), first.prompt.tolist()
        return vllm.RequestOutput(first.request.id, *prompt, None, outputs, finished=True)


def vllm_params(sampling: SamplingConfig) -> "SamplingParams":
    """Return the configured sampling as vLLM's parameters, for user code."""
    from turnwise.internals import vllm  # seconds to import

    values = {name: getattr(sampling, name) for name in (*_CONFIGURED, "max_tokens")}
    lists = {name: list(getattr(sampling, name)) or None for name in ("stop", "stop_token_ids")}
    return vllm.SamplingParams(**values, **lists)


def _prompts_of(given: object) -> list[_Prompt]:
    """Return one prompt, or several, as a list."""
    several: Sequence[object] = [given]
    if isinstance(given, Sequence) and not isinstance(given, str):
        first = given[0] if given else None
        if not (isinstance(first, int) or (isinstance(first, Mapping) and "role" in first)):
            several = given
    return list(map(_prompt_of, several))


def _prompt_of(prompt: object) -> _Prompt:
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(prompt, str):
        return prompt, []
    if isinstance(prompt, Sequence) and prompt:
        if all(isinstance(message, Mapping) and "role" in message for message in prompt):
            return "", [read_parts(dict(message), "a message") for message in prompt]
        if all(isinstance(token, int) for token in prompt):
            return list(prompt), []
    raise InputError(
        f"{KEY}: a prompt is a text, a list of token ids or a list of messages, not {shown(prompt)}"
    )


def _key(messages: Sequence[Message]) -> str:
    """Return a key that is the same for equal conversations."""
    read = [[m.get("role"), m.get("content"), m.get("tool_calls")] for m in messages]
    return json.dumps(read, default=str)
