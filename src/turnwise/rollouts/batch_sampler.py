"""Batch samplers: user code `(llm, prompts, sampling_params) -> outputs` that samples many prompts.

The token ids that a sampler returns are compared with the calls that `LLM` recorded. An id is
trained if a call sampled this id after exactly the ids that precede it; otherwise it is context. So
a sampler may cut answers, add tool results, ask again, and choose among answers: only sampled ids
are trained.

To add a batch sampler: write a function `(llm, prompts, sampling_params) -> outputs`, and set
`rollout.sampler: package.module:name`.
"""

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np

from turnwise.config import RolloutConfig
from turnwise.core.aio import run_in_thread, set_within
from turnwise.core.optional import Foreign, load_object
from turnwise.core.user_code import call_user_code, user_errors
from turnwise.core.watchdog import waiting
from turnwise.errors import InputError, TrajectoryError, describe_error
from turnwise.rollouts.agent_loop import RolloutContext
from turnwise.rollouts.environment import Environment, shown
from turnwise.rollouts.sampler_llm import KEY, LLM, SampledCall, vllm_params
from turnwise.trajectory import Image, Message, Prompt, status_after
from turnwise.trajectory.images import images_in
from turnwise.trajectory.provenance import Provenance
from turnwise.trajectory.turn import MASK

if TYPE_CHECKING:
    from turnwise.internals.vllm import RequestOutput, SamplingParams

QUIET_SECONDS = 0.1
"""Seconds without a new item after which a batch begins although it is not full."""
_UNUSED = "sampler_unused_call"  # event: a call whose tokens no answer contains

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class RolloutSampler(Protocol):
    """Interface of batch samplers; `rollout.sampler` names one as `package.module:name`.

    The name refers to a function, an object, or a class that is built once without arguments. An
    object with a method `generate(prompts, llm, sampling_params)` is also a sampler, for example an
    environment written for the first versions of TRL or verifiers. A sampler is called in threads,
    for several batches at once.

    Args:
        llm: The run's engines, with the methods of vLLM's `LLM`.
        prompts: Conversations, each a list of messages: all conversations of a step, or of the
            groups that wait at the same time; in deterministic runs, a single conversation. A
            problem is in the list once for each of its `sampling.n` answers; `sampling_params.n`
            is 1.
        sampling_params: vLLM's `SamplingParams`, as configured. In a copy, a sampler may change
            `max_tokens`, `stop`, `stop_token_ids` and parameters that affect only the text. The
            trainer assumes that all other parameters keep their values.

    Returns:
        An answer for each prompt, in the order of the prompts. An answer is vLLM's `RequestOutput`,
        whose prompt ids and output ids together are the sequence, or a list of the ids after the
        prompt. A sampler may instead return a dictionary with a list `ids` of such answers, and
        optional lists `messages` (for each answer, the messages after the prompt) and `mask` (for
        each answer, 0 for ids that must not be trained).

    Example:
        class AskTwice(RolloutSampler):
            def __call__(self, llm, prompts, sampling_params):
                asked = []
                for prompt, output in zip(prompts, llm.chat(prompts, sampling_params)):
                    answer = {"role": "assistant", "content": output.outputs[0].text}
                    doubt = {"role": "user", "content": "Are you sure?"}
                    asked.append([*prompt, answer, doubt])
                return llm.chat(asked, sampling_params)
    """

    def __call__(
        self, llm: LLM, prompts: list[list[Message]], sampling_params: "SamplingParams"
    ) -> "Sequence[RequestOutput]":
        """Return an answer to each prompt."""
        ...


@dataclass(slots=True)
class _Answer:
    """A sampler's answer to one prompt."""

    ids: list[int]
    """The whole sequence if `whole`, otherwise only the ids after the prompt."""
    whole: bool
    name: str = ""
    """Name of the request whose output this is; "" if the sampler returned only ids."""
    messages: list[Message] | None = None
    mask: list[bool] = field(default_factory=list)
    """Mask of the last ids: False for ids that must not be trained."""
    calls: list[tuple[SampledCall, int]] = field(default_factory=list)
    """The calls that sampled the answer, in order, each with the number of the call's tokens that
    are in the answer."""


class OneCall(Generic[_Item, _Result]):
    """Items that one call answers together; items may join until the call begins.

    Args:
        work: Waits for the items with `complete`, and returns an answer for each item, in order.
        size: Maximum number of items.
    """

    def __init__(
        self,
        work: "Callable[[OneCall[_Item, _Result]], Coroutine[object, object, Sequence[_Result]]]",
        size: int,
    ) -> None:
        self.is_open = True
        self._size = size
        self._items: dict[object, _Item] = {}  # each has a unique key, as items may be equal
        self._keys: list[object] = []
        """Keys of the items that the call answers."""
        self._joined = asyncio.Event()
        self._work = asyncio.create_task(work(self))

    @property
    def first(self) -> _Item:
        return next(iter(self._items.values()))

    async def complete(self) -> list[_Item]:
        """Wait until the batch is full, or no item joins for `QUIET_SECONDS`; return the items."""
        while self.is_open:
            self._joined.clear()
            if not await set_within(self._joined, QUIET_SECONDS):
                self.is_open = False
        self._keys = list(self._items)
        return list(self._items.values())

    async def answer(self, item: _Item) -> _Result:
        """Add an item, and return its answer. If no caller waits for an answer, cancel the work."""
        key = object()
        self._items[key] = item
        self.is_open = len(self._items) < self._size
        self._joined.set()
        try:
            answers = await asyncio.shield(self._work)
            return answers[self._keys.index(key)]
        finally:
            del self._items[key]
            if not self._items:
                self.is_open = False
                self._work.cancel()


class SamplerLoop:
    """Samples trajectories with `rollout.sampler`, in batches: all trajectories of a step, or all
    that wait at the same time."""

    def __init__(self) -> None:
        self._batch: OneCall[RolloutContext, _Answer] | None = None
        self._samplers: dict[str, Callable[..., Foreign]] = {}

    def load(self, rollout: RolloutConfig) -> None:
        """Import the user's sampler."""
        load_object(rollout.sampler or "", "rollout.sampler")

    async def run(self, environment: Environment, context: RolloutContext) -> None:
        def kind(one: RolloutContext) -> Sequence[object]:
            return one.sampling, one.rollout.sampler, id(one.engine)

        batch = self._batch
        if batch is None or not batch.is_open or kind(batch.first) != kind(context):
            size = context.rollout.prompts_per_step * context.sampling.n
            # In deterministic runs nothing may depend on the order of arrival, so each batch has
            # one item.
            batch = self._batch = OneCall(self._sample, size if context.seed is None else 1)
        with context.timed("agent"), waiting(context.request_id, "sampler"):
            answer = await batch.answer(context)
        trajectory, wanted = context.trajectory, answer.mask
        if not answer.calls:
            raise TrajectoryError(
                "sampler_silent",
                f"the sampler {context.rollout.sampler} returned ids for {trajectory.problem_id}, "
                "and no call of llm sampled any of them after exactly the ids before it",
            )
        wanted = [True] * (len(answer.ids) - len(wanted)) + wanted
        for call, kept in answer.calls:
            done, start = call.completion, len(call.prompt)
            row = len(done.experts) // max(1, start + len(done.token_ids) - 1)
            part = replace(
                done,
                token_ids=done.token_ids[:kept],
                logprobs=done.logprobs[:kept],
                weight_versions=done.weight_versions[:kept],
                finish_reason=done.finish_reason if kept == len(done.token_ids) else "stop",
                experts=done.experts[: row * (start + kept - 1)],
                allowed=done.allowed[:kept],
            )
            context.fork_reason = None
            context.record(call.prompt, part, call.times)
            if not all(own := wanted[start : start + kept]):
                trajectory.turns[-1].streams[MASK] = np.asarray(own, np.float32)
        trajectory.messages = answer.messages or []
        trajectory.status = status_after(done.finish_reason)

    async def _sample(self, batch: OneCall[RolloutContext, _Answer]) -> list[_Answer]:
        joined = await batch.complete()
        contexts = sorted(joined, key=lambda one: (one.route.group, one.trajectory.sample_index))
        rollout, path = contexts[0].rollout, contexts[0].rollout.sampler or ""
        call = partial(
            call_user_code,
            name=f"the sampler {path}",
            seconds=rollout.trajectory_timeout,
            key="rollout.trajectory_timeout",
        )
        params = await run_in_thread(vllm_params, contexts[0].sampling)
        llm = LLM(contexts, params.clone())  # a copy: the user may change `params`
        prompts = [[dict(message) for message in context.problem] for context in contexts]
        try:
            async with user_errors("sampler_error", f"the sampler {path} failed: "):
                if path not in self._samplers:
                    self._samplers[path] = await call(load_sampler, path)
                returned = await call(self._samplers[path], llm, prompts, params)
                answers: list[_Answer] = await call(_read, returned, len(prompts), path)
        finally:
            llm.close()
        for answer, context in zip(answers, contexts, strict=True):
            if not answer.whole:
                prompt = await context.first_prompt(context.problem)
                answer.ids = prompt.tolist() + answer.ids
        await run_in_thread(_find_calls, answers, contexts, llm.calls)
        found = dict(zip(map(id, contexts), answers, strict=True))
        return [found[id(context)] for context in joined]


def load_sampler(path: str) -> Foreign:
    """Return the callable (llm, prompts, sampling_params) that `rollout.sampler` names; raise
    InputError if the name does not lead to one. Runs user code."""
    found: Foreign = load_object(path, KEY)
    try:
        found = found() if isinstance(found, type) else found
    except Exception as error:
        why = describe_error(error)
        raise InputError(f"{KEY}: {path} cannot be built without arguments: {why}") from error
    sampler: Foreign = getattr(found, "generate", found)
    if not callable(sampler):
        raise InputError(
            f"{KEY}: {path} must be a function (llm, prompts, sampling_params), or an object "
            "whose method generate takes these"
        )
    names = ("llm", "prompts", "sampling_params")
    if {*names} <= inspect.signature(sampler).parameters.keys():  # in any order
        return lambda *given: sampler(**dict(zip(names, given, strict=True)))
    return sampler


def _read(returned: Foreign, count: int, path: str) -> list[_Answer]:
    """Return the answers that a sampler returned for `count` prompts; raise InputError if they
    have an unsupported form. Runs user code."""
    answers = []
    more: Mapping[str, Foreign] = returned if isinstance(returned, Mapping) else {"ids": returned}
    try:
        for each in more["ids"]:
            ids, whole = each, hasattr(each, "outputs")
            if whole:
                (output,) = each.outputs
                ids = [*each.prompt_token_ids, *output.token_ids]
            name = str(getattr(each, "request_id", ""))
            answers.append(_Answer([int(token) for token in ids], whole, name))
        kinds: dict[str, Callable[[Foreign], object]] = {"messages": dict, "mask": bool}
        for name, kind in kinds.items():
            for answer, value in zip(answers, more.get(name) or (), strict=name in more):
                setattr(answer, name, list(map(kind, value)))
        read = all(len(answer.mask) in (0, len(answer.ids)) for answer in answers)
    except (KeyError, TypeError, ValueError, AttributeError):
        read = False
    if not read or len(answers) != count:
        raise InputError(
            f"{KEY}: {path} must return {count} RequestOutputs with one output each, or the token "
            f"ids after each of the {count} prompts, not {shown(returned)}"
        )
    return answers


def _find_calls(
    answers: Sequence[_Answer],
    contexts: Sequence[RolloutContext],
    calls: Sequence[SampledCall],
) -> None:
    """Set the `calls` that sampled each answer, and its `messages`, for display and rewards."""
    # Equal ids may be placeholders of different images. An answer that names a call has that call's
    # images. Otherwise the images of the answer's calls must begin with the images of its problem.
    provenance, used = Provenance(images=False), set[int]()
    for call in calls:
        provenance.add(call.prompt, call.completion.token_ids)
    named = {call.request.id: call for call in calls}
    images = [[one.image for one in call.prompt.images] for call in calls]
    for answer, context in zip(answers, contexts, strict=True):
        shown: list[Image] | None = None
        known = named.get(answer.name)
        if known is not None and answer.ids[: len(known.prompt)] == known.prompt.tolist():
            shown = [one.image for one in known.prompt.images]
        fits = partial(_fits, images, images_in(context.problem), shown)
        for number, _, count in provenance.attribute(Prompt(answer.ids), fits):
            used.add(number)
            answer.calls.append((calls[number], count))
        problem, said = [dict(message) for message in context.problem], answer.messages
        if said is None and answer.calls:
            first, last = answer.calls[0][0], answer.calls[-1][0]
            start = len((last if last.messages else first).prompt)
            text = context.template.decode(answer.ids[start:])
            problem, said = last.messages or problem, [{"role": "assistant", "content": text}]
        answer.messages = [*problem, *(said or ())]
    sampled = (number for number, call in enumerate(calls) if call.completion.token_ids)
    if unused := sum(number not in used for number in sampled):
        contexts[0].trajectory.events[_UNUSED] += unused


def _fits(
    images: Sequence[list[Image]], first: list[Image], shown: list[Image] | None, number: int
) -> bool:
    """Return whether call `number` can have sampled an answer to the images `shown`. If these are
    not known (None), return whether the images of the call begin with the images `first`."""
    own = images[number]
    return own[: len(first)] == first if shown is None else shown[: len(own)] == own
