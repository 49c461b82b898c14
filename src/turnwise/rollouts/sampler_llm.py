"""The engines as a batch sampler gets them: `generate` and `chat` of vLLM's `LLM`, recorded.

A conversation that goes on with an answer of an earlier call keeps the ids that were sampled.
Parameters that would change the distribution of the tokens are refused.
"""

import asyncio
import itertools
import json
import time
from collections import defaultdict, deque
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from turnwise.chat.prompts import next_prompt
from turnwise.config import SamplingConfig
from turnwise.core.aio import together
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.core.watchdog import waiting
from turnwise.engine.protocol import Completion, Request, Route, generate
from turnwise.errors import InputError, TrajectoryError, TurnwiseError
from turnwise.rollouts.agent_loop import RolloutContext, stable_seed
from turnwise.rollouts.environment import shown
from turnwise.trajectory import ChatTemplate, Message

if TYPE_CHECKING:
    from turnwise.internals.vllm import RequestOutput, SamplingParams

KEY = "rollout.sampler"
_FIXED = (
    *("temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words"),
    *("allowed_token_ids", "structured_outputs", "extra_args", "prompt_logprobs"),
)
"""vLLM's parameters that the trainer, or the record, takes from the configuration."""
_Wanted = tuple[SamplingConfig, int, int | None]
"""Parameters of a prompt's requests, their number, and their first seed."""


@dataclass(slots=True, eq=False)
class SampledCall:
    """One request to the engines, and its completion."""

    name: str
    prompt: list[int]
    completion: Completion
    session: str
    """Name by which the scheduler keeps a conversation on one engine."""
    asked: float
    ended: float
    messages: list[Message]
    """The conversation that led here; empty for texts and ids."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt as the sampler gave it, in one of three forms."""

    ids: list[int] | None = None
    text: str | None = None
    messages: list[Message] = field(default_factory=list)


class LLM:
    """The engines of a run, as a batch sampler gets them: `generate` and `chat` of vLLM's `LLM`.

    Both wait, so call them from a thread, as a sampler's own; an async sampler uses
    `asyncio.to_thread`. Several calls may run at once.

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
        self._running: set[Future[list[list[SampledCall]]]] = set()
        self._closed = False
        self._answered: dict[str, deque[SampledCall]] = defaultdict(deque)
        """Calls by their conversation, answer included."""

    def generate(
        self,
        prompts: object,
        sampling_params: "SamplingParams | Sequence[SamplingParams] | None" = None,
        *,
        use_tqdm: object = False,
        lora_request: object = None,
    ) -> "list[RequestOutput]":
        """Sample completions.

        Args:
            prompts: One or a list of: a text, a list of ids, a conversation, which the chat
                template renders, `{"prompt": text}` or `{"prompt_token_ids": ids}`.
            sampling_params: For all prompts, or one for each; None takes the configured ones.
            use_tqdm: Ignored: the run has its own display.

        Returns:
            An output for each prompt. One that leaves no room for an answer gets an empty one, with
            finish reason `length`.

        Raises:
            InputError: when parameters would change the distribution of the tokens.
            EngineError: when the engines fail.
        """
        _refuse(lora_request=lora_request)
        return self._sample(list(map(_prompt_of, _listed(prompts))), sampling_params, None)

    def chat(
        self,
        messages: object,
        sampling_params: "SamplingParams | Sequence[SamplingParams] | None" = None,
        use_tqdm: object = False,
        lora_request: object = None,
        *,
        tools: list[JsonObject] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: object = None,
    ) -> "list[RequestOutput]":
        """Answer conversations: one list of messages, or a list of these; else as `generate`."""
        _refuse(
            lora_request=lora_request,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message or None,
            add_generation_prompt=None if add_generation_prompt else False,
        )
        prompts = list(map(_prompt_of, _listed(messages)))
        if not all(prompt.messages for prompt in prompts):
            raise InputError(f"{KEY}: llm.chat takes lists of messages")
        return self._sample(prompts, sampling_params, tools)

    def get_tokenizer(self) -> Foreign:
        """Return the model's tokenizer."""
        return self._context.template.tokenizer

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> list[Foreign]:
        """Call a method of the workers of all engines; see `VllmEngine.collective_rpc`."""
        engine: Foreign = self._context.engine
        call: Coroutine[object, object, list[Foreign]]
        call = engine.collective_rpc(method, timeout, args, kwargs)
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def close(self) -> None:
        """End what still runs: the sampler has returned, or missed its deadline."""
        self._closed = True
        for future in list(self._running):
            future.cancel()

    def _sample(
        self, prompts: list[_Prompt], given: object, tools: list[JsonObject] | None
    ) -> "list[RequestOutput]":
        """Ask the engines, in the sampler's thread, and wait for all answers."""
        params: list[Foreign] = [self._own if given is None else given] * len(prompts)
        if isinstance(given, Sequence):
            params = list(given)
        if len(params) != len(prompts):
            raise InputError(f"{KEY}: {len(params)} sampling parameters for {len(prompts)} prompts")
        wanted = [self._sampling_of(each) for each in params]
        if self._closed:
            raise TurnwiseError("the sampler's batch has ended")
        asked = asyncio.run_coroutine_threadsafe(self._ask(prompts, wanted, tools), self._loop)
        self._running.add(asked)
        try:
            answers = asked.result()
        finally:
            self._running.discard(asked)
        return [self._output(*each) for each in zip(answers, params, strict=True)]

    def _sampling_of(self, params: Foreign) -> _Wanted:
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
        most = params.max_tokens or self._context.max_length
        changes = {
            "max_tokens": most,
            "min_tokens": min(sampling.min_tokens, most),
            "stop": list(params.stop or ()),
            "stop_token_ids": list(params.stop_token_ids or ()),
        }
        return sampling.model_copy(update=changes), int(params.n or 1), params.seed

    async def _ask(
        self,
        prompts: Sequence[_Prompt],
        wanted: Sequence[_Wanted],
        tools: list[JsonObject] | None,
    ) -> list[list[SampledCall]]:
        async def answer(prompt: _Prompt, how: _Wanted) -> list[SampledCall]:
            sampling, count, seed = how
            numbers = [next(self._numbers) for _ in range(count)]
            ids, session = await self._ids_of(prompt, tools)
            seeds = [None if seed is None else seed + index for index in range(count)]
            return await together(
                self._complete(number, ids, sampling, own, session, prompt.messages)
                for number, own in zip(numbers, seeds, strict=True)
            )

        with ExitStack() as held:
            for context in self._contexts:  # engine.request_timeout limits the wait
                held.enter_context(context.timed("generate"))
            return await together(map(answer, prompts, wanted))

    async def _ids_of(
        self, prompt: _Prompt, tools: list[JsonObject] | None
    ) -> tuple[list[int], str]:
        """Return a prompt's ids, and the session that it continues, "" if it continues none."""
        context, messages = self._context, prompt.messages
        if prompt.ids is not None:
            return prompt.ids, ""
        if prompt.text is not None:
            return await context.encode(prompt.text, add_special_tokens=True), ""
        for end in range(len(messages) - 1, 0, -1):
            if messages[end - 1].get("role") != "assistant":
                continue
            if known := self._answered.get(_key(messages[:end])):
                call = known[0]
                known.rotate(-1)  # equal answers are continued in turn
                ids, _ = await next_prompt(
                    context.template,
                    prompt_token_ids=call.prompt,
                    completion_token_ids=call.completion.token_ids,
                    new_messages=messages[end:],
                    conversation=messages,
                    tools=tools,
                    history=context.rollout.history,
                )
                return ids, call.session
        return await context.first_prompt(messages, tools=tools), ""

    async def _complete(
        self,
        number: int,
        ids: list[int],
        sampling: SamplingConfig,
        seed: int | None,
        session: str,
        messages: list[Message],
    ) -> SampledCall:
        context, asked = self._context, time.time()
        name = f"{context.request_id}-batch-{number}"
        session, room = session or name, context.max_length - len(ids)
        if seed is None and context.seed is not None:
            seed = stable_seed(context.seed, number)
        completion = Completion([], [], [], "length")
        if room > 0:
            request = Request(ids, sampling.within(room), name, seed, Route(session=session))
            with waiting(f"request {name}", "answer"):
                completion = await generate(context.engine, request)
        if completion.finish_reason == "abort":
            raise TrajectoryError("engine_abort", f"{name} was aborted by the engine")
        call = SampledCall(name, ids, completion, session, asked, time.time(), messages)
        self.calls.append(call)
        return call

    def _output(self, calls: list[SampledCall], params: Foreign) -> "RequestOutput":
        """Return the calls of one prompt as vLLM would, in copies, which the user may change."""
        from turnwise.internals import vllm  # seconds to import

        template, first = self._context.template, calls[0]
        outputs: list[Foreign] = []
        for index, call in enumerate(calls):
            done = call.completion
            text, stopped = _text_of(template, done.token_ids, params)
            pairs = zip(done.token_ids, done.logprobs, strict=True)
            output = vllm.CompletionOutput(
                index,
                text,
                list(done.token_ids),
                sum(done.logprobs),
                None if params.logprobs is None else [{id: vllm.Logprob(p)} for id, p in pairs],
                finish_reason=done.finish_reason,
                stop_reason=stopped,
            )
            outputs.append(output)
            if call.messages:
                answer = {"role": "assistant", "content": text}
                self._answered[_key([*call.messages, answer])].append(call)
        prompt, ids = template.decode_all(first.prompt), list(first.prompt)
        return vllm.RequestOutput(first.name, prompt, ids, None, outputs, finished=True)


def vllm_params(sampling: SamplingConfig) -> "SamplingParams":
    """Return the configured sampling as vLLM's parameters, for user code."""
    from turnwise.internals import vllm  # seconds to import

    names = ("temperature", "top_p", "top_k", "max_tokens", "min_tokens", "ignore_eos")
    values = {name: getattr(sampling, name) for name in names}
    lists = {name: list(getattr(sampling, name)) or None for name in ("stop", "stop_token_ids")}
    return vllm.SamplingParams(**values, **lists)


def _refuse(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise InputError(f"{KEY}: llm takes no {name}: the run's configuration decides")


def _listed(prompts: object) -> list[object]:
    """Return one prompt, or several, as a list."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
        return [prompts]
    first = prompts[0] if prompts else None
    if isinstance(first, int) or (isinstance(first, Mapping) and "role" in first):
        return [prompts]
    return list(prompts)


def _prompt_of(prompt: object) -> _Prompt:
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(prompt, str):
        return _Prompt(text=prompt)
    if isinstance(prompt, Sequence) and prompt:
        if all(isinstance(message, Mapping) and "role" in message for message in prompt):
            return _Prompt(messages=[dict(message) for message in prompt])
        if all(isinstance(token, int) for token in prompt):
            return _Prompt(ids=list(prompt))
    raise InputError(
        f"{KEY}: a prompt is a text, a list of token ids or a list of messages, not {shown(prompt)}"
    )


def _key(messages: Sequence[Message]) -> str:
    """Return what two conversations share if they are the same."""
    read = [[m.get("role"), m.get("content"), m.get("tool_calls")] for m in messages]
    return json.dumps(read, default=str)


def _text_of(
    template: ChatTemplate, token_ids: list[int], params: Foreign
) -> tuple[str, str | None]:
    """Return a completion's text as vLLM does, and the string at which it stopped, if any."""
    text = str(
        template.tokenizer.decode(
            token_ids,
            skip_special_tokens=params.skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
    )
    found = [(text.index(stop), stop) for stop in params.stop or () if stop in text]
    if not found:
        return text, None
    at, stop = min(found)
    return text[: at + len(stop) if params.include_stop_str_in_output else at], stop
