"""Chat completions without HTTP, and users' classes that run conversations with them.

`ChatCompletionScheduler` has the methods of verl's class of the same name. `ChatBackend` answers in
this process with the code of the OpenAI server. Sessions keep each conversation's tokens exactly as
they were sampled, and every key of a request means the same as over HTTP.
"""

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from contextvars import ContextVar
from http import HTTPStatus
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from turnwise.chat.session import NAME_RULE, Session, valid_name
from turnwise.chat.session_store import SessionStore
from turnwise.compat.verl.data_proto import DataProto
from turnwise.compat.verl.keys import ROOT, VERL_KEYS
from turnwise.config import AgentSamplingRule, Config, SamplingConfig
from turnwise.core.admission import Admission, Place
from turnwise.core.aio import run_in_thread, together
from turnwise.core.deadlines import StallClock, trajectory_limits
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.core.user_code import call_user_code, describe_user_error, user_errors
from turnwise.engine.protocol import Generator, TurnTimes
from turnwise.errors import (
    DeadlineError,
    EngineError,
    InputError,
    TrajectoryError,
    TurnwiseError,
    first_line,
)
from turnwise.serving.seats import limits_of
from turnwise.trajectory import Message, Trajectory

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    Completions: TypeAlias = ChatCompletion | AsyncGenerator[ChatCompletionChunk, None]

_HEADERS = {"x-request-id", "x-session-id"}
_SAMPLING_NAMES = {"max_completion_tokens": "max_tokens", "vllm_xargs": "logits_processor_args"}
"""OpenAI's and vLLM's names of sampling keys, mapped to our names."""
Callback = Callable[..., Awaitable[object] | object]
"""Called as `callback(completions, info, exception)`; may be async.

`completions` is the `ChatCompletion`, or with `stream=True` an async generator of
`ChatCompletionChunk`s; it is None after an error. `info` is the submitted
`callback_additional_info`. `exception` is the error, or None.
"""


_conversation: ContextVar[Session | None] = ContextVar("conversation", default=None)
"""The session of the running call of `generate_sequences`; tasks that the call starts inherit
it."""


class SchedulerConfig:
    """The run's configuration as a chat scheduler sees it. Its values can be read by our names, and
    by verl's names in `actor_rollout_ref.rollout`.

    For example, `config.temperature` is our `sampling.temperature`, `config.response_length` is
    `rollout.max_response_tokens`, and `config.val_kwargs` is `eval.sampling`. `config.n` is 1,
    because each conversation is a separate call.
    """

    def __init__(self, config: Config, chats: "ChatBackend") -> None:
        self.chats = chats
        """Backend that answers the requests."""
        self._config = config

    def __getattr__(self, name: str) -> Foreign:
        if name.startswith("_"):  # a copy has no _config yet, so avoid endless recursion
            raise AttributeError(name)
        if name in (fixed := {"n": 1, "val_kwargs": self._config.eval.sampling}):
            return fixed[name]
        for key in (name, VERL_KEYS.get(f"{ROOT}rollout.{name}", name)):
            with suppress(AttributeError):
                return attrgetter(key)(self._config)
        raise AttributeError(f"the configuration of a chat scheduler has no {name}")

    def get(self, name: str, default: object = None) -> Foreign:
        """Return a value by its name, or the default if the name is unknown, as in verl."""
        return getattr(self, name, default)


class ChatCompletionScheduler:
    """Runs conversations; the base class for the class that `rollout.chat_scheduler` names.

    Each process that runs trajectories has one instance, which may keep state. Conversations run
    concurrently, each in its own call of `generate_sequences`. A request belongs to the
    conversation whose call started its task, and all sampled turns become part of the trajectory.

    Args:
        config: The run's configuration; kept as `self.config`.
        model_path: Name of the model in requests; kept as `self.model_name`.
        server_addresses: Empty, because requests reach the engines without HTTP.
        max_cache_size: Ignored: `serving.known_sessions` limits the remembered conversations.

    Example:
        class TwoRounds(ChatCompletionScheduler):
            async def generate_sequences(self, batch, **sampling_params):
                messages = batch.non_tensor_batch["raw_prompt"][0].tolist()
                await self.submit_chat_completions(
                    self.answered, {"messages": messages}, messages=messages, **sampling_params
                )

            async def answered(self, completions, info, exception):
                ...  # append the answer and the next question, and submit them
    """

    def __init__(
        self,
        config: SchedulerConfig,
        model_path: str,
        server_addresses: Sequence[str] = (),
        max_cache_size: int = 10_000,
    ) -> None:
        self.config = config
        self.model_name = model_path
        self.tokenizer = config.chats.tokenizer
        self._chats = config.chats  # kept, because a subclass may replace self.config

    async def submit_chat_completions(
        self,
        callback: Callback,
        callback_additional_info: JsonObject,
        **chat_complete_request: object,
    ) -> None:
        """Complete a chat, then call `callback(completions, callback_additional_info, exception)`.

        Returns when the callback has returned, and raises its exception. The callback may be async,
        and may submit the next turn and await it. `chat_completion` describes the request's keys.
        """
        completions, exception = None, None
        try:
            completions = await self.chat_completion(**chat_complete_request)
        except Exception as error:  # the callback handles it
            exception = error
        result = callback(completions, callback_additional_info, exception)
        if inspect.isawaitable(result):
            await result

    async def chat_completion(self, **request: object) -> "Completions":
        """Answer one chat request.

        Args:
            request: OpenAI's keys and vLLM's additional keys: `messages`, `model` (any name), `n`,
                `temperature`, `max_tokens`, `tools` ... `extra_body` may contain further keys.
                `extra_headers` may contain `x-request-id`, the id of the completion that `messages`
                continue or your own id of the conversation, or `x-session-id`, a conversation's
                name.

        Returns:
            A `ChatCompletion`. Each choice has `token_ids`; its message has `prompt_token_ids`,
            `generation_token_ids`, `generation_log_probs` and `weight_versions`. With
            `stream=True`, an async generator of `ChatCompletionChunk`s, whose choices have
            `token_ids` if they contain tokens; closing it ends the request.

        Raises:
            InputError: when the prompt is too long, or when a key cannot be served; the error names
                the key.
            EngineError, DeadlineError: when the workers fail.
        """
        return await self._chats.create(request, _conversation.get())

    async def generate_sequences(self, batch: DataProto, **sampling_params: object) -> object:
        """Run the conversations of a batch; this base class requests one answer for each.

        Args:
            batch: `non_tensor_batch["raw_prompt"]` contains arrays of messages. Turnwise passes
                one conversation; in a run, the other columns are the fields of the trajectory's
                row.
            sampling_params: Keys for each request.

        Returns:
            A `DataProto` or anything else, such as None. The rows, masks and `rm_scores` of a
            `DataProto` decide what is trained (see `data_proto.apply_batch`), and
            `LLMServerManager.generate_sequences` returns its rows. If the result is not a
            `DataProto`, all sampled tokens are trained.
        """

        def answered(completions: object, info: object, exception: Exception | None) -> None:
            if exception is not None:
                raise exception

        await together(
            self.submit_chat_completions(answered, {}, messages=list(messages), **sampling_params)
            for messages in batch.non_tensor_batch["raw_prompt"]
        )
        return None


class ChatBackend:
    """Answers chat requests in this process, and runs conversations with an instance of the class
    `scheduler`.

    `create` and `events` may be used on any event loop, the other methods only on the event loop
    that called `start`.
    """

    instance: ChatCompletionScheduler
    """The instance of `scheduler`; `start` sets it."""

    def __init__(
        self,
        config: Config,
        generator: Generator,
        scheduler: type[ChatCompletionScheduler] = ChatCompletionScheduler,
        admission: Admission | None = None,
    ) -> None:
        self.config = config
        self.model_name = config.serving.served_model_name or config.model.path
        self.sessions = SessionStore.of(config.sampling, config.serving)
        self._scheduler = scheduler
        self._generator = generator
        self._admission = admission or Admission(limits_of(config))

    async def start(self) -> None:
        """Build vLLM's application and the scheduler.

        Raises:
            InputError: when vLLM refuses the model, or the user's class fails.
        """
        # In a thread, because importing vLLM's application takes seconds.
        vllm_app = await run_in_thread(import_module, "turnwise.serving.openai.vllm_app")
        self._loop = asyncio.get_running_loop()
        names = [self.model_name]
        self._app = await vllm_app.build(self.config, self._generator, self.sessions, names)
        self._chats = self._app.state.chats
        self.tokenizer = self._chats.tokenizer
        await self.set_scheduler(self._scheduler)

    async def set_scheduler(self, scheduler: type[ChatCompletionScheduler]) -> None:
        """Run further conversations with an instance of this class, made with verl's arguments."""
        config, model = SchedulerConfig(self.config, self), self.model_name
        name = f"the chat scheduler {scheduler.__module__}:{scheduler.__qualname__}"

        async def make() -> ChatCompletionScheduler:
            return scheduler(config=config, model_path=model, server_addresses=[])

        seconds, key = self.config.rollout.environment_timeout, "rollout.environment_timeout"
        async with user_errors(None, f"rollout.chat_scheduler: {name} cannot be made: ", ()):
            self.instance = await call_user_code(make, name=name, seconds=seconds, key=key)
        self._who = name

    async def stop(self) -> None:
        if hasattr(self, "_app"):
            self._app.state.engine_client.shutdown()

    async def create(
        self, request: Mapping[str, object], session: Session | None = None
    ) -> "Completions":
        """Answer a request; see `ChatCompletionScheduler.chat_completion`."""
        from openai.types.chat import ChatCompletion, ChatCompletionChunk  # a second to import

        replies = self._replies(request, session)

        async def chunks() -> AsyncGenerator[ChatCompletionChunk, None]:
            with _own_errors():
                async with aclosing(replies):
                    async for event in replies:
                        for line in str(event).split("\n"):
                            data = line.removeprefix("data: ")
                            if data not in (line, "[DONE]"):
                                yield ChatCompletionChunk.model_validate(_checked(json.loads(data)))

        with _own_errors():
            if (first := await anext(replies)) is None:
                return chunks()
            await replies.aclose()
            assert isinstance(first, dict)
            return ChatCompletion.model_validate(_checked(first))

    async def events(self, request: Mapping[str, object]) -> AsyncGenerator[tuple[int, str], None]:
        """Answer a request as verl's server actor does.

        Yields pairs of an HTTP status and a server-sent event ("data: ..."): one pair for the whole
        answer, one for each chunk of a stream, or one for an error.
        """
        from turnwise.internals.vllm_server import create_error_response
        from turnwise.serving.openai.vllm_errors import client_error

        try:
            with _own_errors():
                async with aclosing(self._replies(request, None)) as replies:
                    async for reply in replies:
                        if isinstance(reply, dict):
                            failed = reply.get("error") or {"code": HTTPStatus.OK.value}
                            yield int(failed["code"] or 500), f"data: {json.dumps(reply)}\n\n"
                        elif reply is not None:
                            yield HTTPStatus.OK.value, str(reply)
        except Exception as error:  # sent to the caller as an answer
            refusal = create_error_response(client_error(error))
            yield refusal.error.code, f"data: {refusal.model_dump_json()}\n\n"

    async def _replies(
        self, request: Mapping[str, object], session: Session | None
    ) -> AsyncGenerator[object, None]:
        """Yield vLLM's answer as a dictionary; for a stream, yield None and then its events.

        Closing the generator ends the request.
        """
        replies = asyncio.Queue[object]()
        # Convert the request on this loop, because it may contain the user's objects.
        tree: JsonObject = dict(request)
        tree |= tree.pop("extra_body", None) or {}
        given = tree.pop("extra_headers", None) or {}
        headers = {name.lower(): str(value) for name, value in given.items()}
        if unknown := headers.keys() - _HEADERS:
            raise InputError(
                f"extra_headers takes x-request-id and x-session-id, and not {min(unknown)}"
            )
        tree["messages"] = [  # callers may also pass OpenAI's message objects
            message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else message
            for message in tree.get("messages", ())
        ]
        tree["return_token_ids"] = True
        answering = self._answer(tree, headers, session, replies)
        running = asyncio.run_coroutine_threadsafe(answering, self._loop)
        begun = False
        try:
            while True:
                waiting = asyncio.run_coroutine_threadsafe(replies.get(), self._loop)
                reply = await asyncio.wrap_future(waiting)
                if isinstance(reply, Exception):
                    raise reply
                if begun and reply is None:
                    return
                begun = True
                yield reply
                if isinstance(reply, dict):
                    return
        finally:
            running.cancel()

    async def converse(
        self,
        trajectory: Trajectory,
        batch: DataProto,
        sampling: SamplingConfig,
        *,
        agent_sampling: AgentSamplingRule | Literal["any"] | None = None,
        group: str = "",
        sampling_params: Mapping[str, object] | None = None,
        clock: StallClock | None = None,
        place: Place | None = None,
        calls: list[TurnTimes] | None = None,
    ) -> DataProto | None:
        """Run one conversation (a `batch` of one row); return the `DataProto` that the scheduler
        returns, or None if it returns anything else.

        `trajectory` records the sampled turns. `agent_sampling` decides how requests may change
        `sampling`; None allows no changes, "any" allows all.

        Raises:
            TrajectoryError: when the class raises (chat_scheduler_error) or samples nothing
                (chat_scheduler_silent).
        """
        session = self.sessions.open_private(
            trajectory,
            sampling=sampling,
            agent_sampling=agent_sampling,
            group=group,
            max_response_tokens=self.config.rollout.max_response_tokens,
            max_turns=self.config.rollout.max_turns,
            calls=calls,
        )
        session.clock, session.place = clock, place or session.place
        instance, name = self.instance, self._who
        made: DataProto | None = None

        async def hold() -> DataProto | None:
            _conversation.set(session)
            value: Foreign = await instance.generate_sequences(batch, **(sampling_params or {}))
            # Also accept another package's DataProto, such as verl's.
            is_batch = hasattr(value, "batch") and hasattr(value, "non_tensor_batch")
            return value if is_batch else None

        try:
            seconds, key = self.config.rollout.trajectory_timeout, "rollout.trajectory_timeout"
            made = await call_user_code(hold, name=name, seconds=seconds, key=key)
        except Exception as raised:
            error = raised
            while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
                error = error.exceptions[0]
            if isinstance(error, TrajectoryError | EngineError | DeadlineError):
                raise error from raised.__cause__
            if not session.out_of_room:
                message = await describe_user_error(error)
                raise TrajectoryError("chat_scheduler_error", f"{name}: {message}") from error
        finally:
            self.sessions.close(session.id)
        session.finish()
        if session.lost_turns:
            trajectory.events["lost_turn"] += session.lost_turns
        if not trajectory.turns:
            why = f"{name} sampled nothing in the tasks that generate_sequences started"
            raise TrajectoryError("chat_scheduler_silent", why)
        return made

    async def generate_sequences(
        self, prompts: DataProto | Sequence[Sequence[Message]], **sampling_params: object
    ) -> DataProto:
        """Run `sampling.n` conversations for each prompt; return their tokens as one batch.

        At most `rollout.concurrency` conversations run at once. If all fail, the first error is
        raised.

        Args:
            prompts: Lists of messages, or a batch with the column `raw_prompt`. If the batch's
                `meta_info` has `validate` true or `do_sample` false, `n` is 1 and the temperature
                0, as in verl, unless `sampling_params` set them.
            sampling_params: Changes to the configuration's `sampling`, by its keys or OpenAI's.

        Returns:
            One row for each conversation (or for each of its branches), in the prompts' order, as
            in `DataProto.from_trajectories`. If the scheduler returned a batch for a conversation,
            the rows of that batch replace the conversation's rows. Only columns that all rows have
            are kept. `meta_info["dropped"]` counts failed conversations by reason.
        """
        if not isinstance(prompts, DataProto):
            prompts = DataProto.from_conversations(prompts)
        if "raw_prompt" not in prompts.non_tensor_batch:
            raise InputError("generate_sequences needs conversations in the column raw_prompt")
        greedy = prompts.meta_info.get("validate") or not prompts.meta_info.get("do_sample", True)
        tree: JsonObject = {"n": 1, "temperature": 0.0} if greedy else {}
        tree |= {_SAMPLING_NAMES.get(name, name): value for name, value in sampling_params.items()}
        if unknown := tree.keys() - SamplingConfig.model_fields:
            raise InputError(f"there is no sampling key {min(unknown)}")
        try:
            sampling = SamplingConfig.model_validate(self.config.sampling.model_dump() | tree)
        except ValueError as error:
            raise InputError(f"sampling: {_sentence(error)}") from error
        params = {name: value for name, value in sampling_params.items() if name != "n"}
        failures: list[TurnwiseError] = []
        rollout = self.config.rollout

        async def one(index: int, number: int) -> tuple[int, Trajectory, DataProto | None] | None:
            trajectory, row = Trajectory(str(index), number), prompts.row(index)
            limits = trajectory_limits(rollout.trajectory_timeout, rollout.stall_timeout)
            try:
                async with self._admission.admitted() as place, limits as clock:
                    with place.idle():  # it only counts as busy during requests
                        made = await self.converse(
                            *(trajectory, row, sampling),
                            agent_sampling="any",
                            sampling_params=params,
                            clock=clock,
                            place=place,
                        )
            except (TrajectoryError, EngineError, DeadlineError) as error:
                failures.append(error)
                return None
            return index, trajectory, made

        works = (one(i, number) for i in range(len(prompts)) for number in range(sampling.n))
        done = [each for each in await together(works) if each is not None]
        if failures and not done:
            raise failures[0]
        batch = await self._batch_of(done)
        late = {True: "engine_timeout", False: "engine_error"}
        batch.meta_info["dropped"] = Counter(
            getattr(error, "reason", late[isinstance(error, DeadlineError)]) for error in failures
        )
        return batch

    async def _batch_of(
        self, done: Sequence[tuple[int, Trajectory, DataProto | None]]
    ) -> DataProto:
        """Join conversations into one batch.

        Args:
            done: For each conversation the index of its prompt, its trajectory, and the scheduler's
                batch or None.
        """
        pad = self.tokenizer.pad_token_id
        pad = self.tokenizer.eos_token_id if pad is None else pad

        def joined() -> DataProto:
            if all(made is None for *_, made in done):
                rows = [index for index, *_ in done]
                return DataProto.from_trajectories([each for _, each, _ in done], rows, pad)
            batches = []
            for index, trajectory, made in done:
                own, more = made, {} if made is None else made.non_tensor_batch
                if own is None or own.batch is None:
                    own = DataProto.from_trajectories([trajectory], [index], pad)
                columns = {**own.non_tensor_batch, **more, "index": np.full(len(own), index)}
                batches.append(DataProto(own.batch, columns, dict(own.meta_info)))
            return DataProto.concat(batches, pad)

        seconds, key = self.config.rollout.environment_timeout, "rollout.environment_timeout"
        name = f"the batch of {self._who}"
        async with user_errors(None, f"{name} is wrong: "):
            batch: DataProto = await call_user_code(joined, name=name, seconds=seconds, key=key)
        return batch

    async def _answer(
        self,
        tree: JsonObject,
        headers: Mapping[str, str],
        own: Session | None,
        replies: asyncio.Queue[object],
    ) -> None:
        """Put the answer into `replies`: vLLM's answer; for a stream, None, then the events, then
        None; or an error."""
        try:
            name, previous = headers.get("x-session-id"), headers.get("x-request-id")
            if own is not None:
                name, previous = own.id, None
            elif name is not None and not valid_name(name):
                raise InputError(f"x-session-id: {NAME_RULE}")
            elif name is None and previous and not self.sessions.has_completion(previous):
                if valid_name(previous) and not previous.startswith("chatcmpl-"):
                    name, previous = previous, None  # the caller's own id of the conversation
                else:
                    raise InputError(
                        f"x-request-id: no completion {previous} is remembered "
                        "(serving.session_idle, serving.session_memory_mb)"
                    )
            whole: JsonObject | None = None
            with self._chats.serving(name, previous) as context:
                answer = await self._chats.answer_here(tree, context)
                if isinstance(answer, dict):
                    whole = answer
                    if not whole.get("error"):
                        await context.deliver()
                else:
                    replies.put_nowait(None)
                    async with aclosing(answer) as events:
                        async for event in events:
                            await context.deliver()
                            replies.put_nowait(event)
            replies.put_nowait(whole)
        except asyncio.CancelledError:  # a caller that did not cancel this still waits
            replies.put_nowait(EngineError("the chat completion was cancelled"))
            raise
        except Exception as error:  # `_replies` raises it
            replies.put_nowait(error)


@contextmanager
def _own_errors() -> Iterator[None]:
    """Convert errors from vLLM's application to ours; other errors pass unchanged."""
    try:
        yield
    except Exception as error:
        from turnwise.internals.vllm_server import GracefulHTTPError, VLLMError

        if isinstance(error, GracefulHTTPError):
            raise EngineError(str(error)) from error
        if isinstance(error, (VLLMError, ValueError, TypeError)):
            raise InputError(_sentence(error)) from error
        raise


def _sentence(error: Exception) -> str:
    """Return an error as one sentence; for a pydantic error, return its first detail with the
    key."""
    errors = getattr(error, "errors", None)
    if callable(errors) and (details := errors()):
        key = ".".join(str(part) for part in details[0]["loc"])
        return f"{key}: {details[0]['msg']}" if key else str(details[0]["msg"])
    return first_line(error)


def _checked(tree: JsonObject) -> JsonObject:
    """Return an answer from vLLM's application; if it is an error, raise the error."""
    if error := tree.get("error"):
        kind = InputError if int(error.get("code") or 500) < 500 else EngineError
        raise kind(str(error.get("message")))
    return tree
