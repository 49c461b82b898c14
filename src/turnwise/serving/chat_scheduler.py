"""Chat completions without HTTP, and users' classes that lead conversations with them.

`ChatCompletionScheduler` has the methods of verl's class of that name. `ChatBackend` answers in
this process with the OpenAI server's own code: sessions keep each conversation's tokens exactly as
they were sampled, and every key of a request means the same as over HTTP.
"""

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias, cast

from turnwise.chat.session import NAME_RULE, Session, valid_name
from turnwise.chat.session_store import SessionStore
from turnwise.config import Config, SamplingConfig
from turnwise.core.aio import run_in_thread, together
from turnwise.core.deadlines import StallClock, trajectory_limits
from turnwise.core.json_types import JsonObject
from turnwise.core.user_code import call_user_code, describe_user_error
from turnwise.engine.protocol import Generator, TurnTimes
from turnwise.errors import (
    DeadlineError,
    EngineError,
    InputError,
    TrajectoryError,
    TurnwiseError,
    first_line,
)
from turnwise.serving.data_proto import DataProto
from turnwise.trajectory import Message, Trajectory

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    Completions: TypeAlias = ChatCompletion | AsyncGenerator[ChatCompletionChunk, None]

_HEADERS = {"x-request-id", "x-session-id"}
_SAMPLING_NAMES = {"max_completion_tokens": "max_tokens", "vllm_xargs": "logits_processor_args"}
"""Our names of sampling keys, by OpenAI's and vLLM's."""
Callback = Callable[..., Awaitable[object] | object]
"""Called as `callback(completions, info, exception)`; may be async.

`completions` is the `ChatCompletion`, with `stream=True` an async generator of
`ChatCompletionChunk`s, and None after an error. `info` is the value that was submitted.
`exception` is the error, or None.
"""


class ChatCompletionScheduler:
    """Leads conversations; the base class for the class that `rollout.chat_scheduler` names.

    In a run each trajectory gets its own instance, whose `generate_sequences` is called once, with
    that trajectory's conversation. All sampled turns become part of the trajectory.

    Args:
        chats: Answers the requests.
        session: Records all sampled turns; with None, each request begins a conversation unless
            `extra_headers` names one.

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

    def __init__(self, chats: "ChatBackend", session: Session | None = None) -> None:
        self.config = chats.config
        """The run's configuration: `config.sampling.temperature`, `config.sampling.max_tokens`."""
        self.model_name = chats.model_name
        self.tokenizer = chats.tokenizer
        self._chats = chats
        self._session = session

    async def submit_chat_completions(
        self,
        callback: Callback,
        callback_additional_info: JsonObject,
        **chat_complete_request: object,
    ) -> None:
        """Complete a chat, then call `callback(completions, callback_additional_info, exception)`.

        Returns when the callback, which may be async, has returned, and raises its exception. It
        may submit the next turn and await it. The request is as for `chat_completion`.
        """
        completions, exception = None, None
        try:
            completions = await self.chat_completion(**chat_complete_request)
        except Exception as error:  # the callback decides about it
            exception = error
        result = callback(completions, callback_additional_info, exception)
        if inspect.isawaitable(result):
            await result

    async def chat_completion(self, **request: object) -> "Completions":
        """Answer one chat request.

        Args:
            request: OpenAI's keys and vLLM's additional ones: `messages`, `model` (any name), `n`,
                `temperature`, `max_tokens`, `tools` ... `extra_body` may contain more of them.
                `extra_headers` may contain `x-request-id`, the id of the completion that `messages`
                continue, or `x-session-id`, a conversation's name.

        Returns:
            A `ChatCompletion`. Each choice has `token_ids`, and its message `prompt_token_ids`,
            `generation_token_ids`, `generation_log_probs` and `weight_versions`. With
            `stream=True`: an async generator of `ChatCompletionChunk`s, whose choices have
            `token_ids` if they contain tokens; closing it ends the request.

        Raises:
            InputError: naming the key that cannot be served, or when the prompt is too long.
            EngineError, DeadlineError: when the workers fail.
        """
        return await self._chats.create(request, self._session)

    async def generate_sequences(self, batch: DataProto, **sampling_params: object) -> object:
        """Run the conversations of a batch; this base class asks for one answer each.

        Args:
            batch: `non_tensor_batch["raw_prompt"]` contains arrays of messages; in a run there is
                only one, and the other columns are those of the trajectory's row.
            sampling_params: Keys for each request.

        Returns:
            Any value; it is ignored, because the session records all sampled turns.
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
    """Answers chat requests in this process, and leads conversations with the class `scheduler`.

    `create` may be awaited on any event loop, all other methods only on the loop of `start`.
    """

    def __init__(
        self,
        config: Config,
        generator: Generator,
        scheduler: type[ChatCompletionScheduler] = ChatCompletionScheduler,
    ) -> None:
        self.config = config
        self.scheduler = scheduler
        self.model_name = config.serving.served_model_name or config.model.path
        self.sessions = SessionStore.from_config(config)
        self._generator = generator
        self._slots = asyncio.Semaphore(config.rollout.concurrency)

    async def start(self) -> None:
        """Build vLLM's application; raise `InputError` when vLLM refuses the model."""
        # In a thread: importing vLLM's application takes seconds.
        vllm_app = await run_in_thread(import_module, "turnwise.serving.openai.vllm_app")
        self._loop = asyncio.get_running_loop()
        names = [self.model_name]
        self._app = await vllm_app.build(self.config, self._generator, self.sessions, names)
        self._chats = self._app.state.chats
        self.tokenizer = self._chats.tokenizer

    async def stop(self) -> None:
        if hasattr(self, "_app"):
            self._app.state.engine_client.shutdown()

    async def create(
        self, request: Mapping[str, object], session: Session | None = None
    ) -> "Completions":
        replies = self._replies(request, session)
        if (first := await anext(replies)) is None:
            return cast("AsyncGenerator[ChatCompletionChunk, None]", replies)
        await replies.aclose()
        return cast("ChatCompletion", first)

    async def _replies(
        self, request: Mapping[str, object], session: Session | None
    ) -> AsyncGenerator[object, None]:
        """Yield the completion; or None, and the chunks of a stream. Closing ends the request."""
        replies = asyncio.Queue[object]()
        try:  # here, and not on the other loop: its objects may be the user's own
            tree: JsonObject = dict(request)
            tree |= tree.pop("extra_body", None) or {}
            given = tree.pop("extra_headers", None) or {}
            headers = {name.lower(): str(value) for name, value in given.items()}
            if unknown := headers.keys() - _HEADERS:
                raise InputError(
                    f"extra_headers takes x-request-id and x-session-id, and not {min(unknown)}"
                )
            tree["messages"] = [  # callers may pass OpenAI's objects, too
                message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else message
                for message in tree.get("messages", ())
            ]
            tree["return_token_ids"] = True
        except Exception as error:
            own = _own(error)
            raise own from own.__cause__
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
        finally:
            running.cancel()

    async def converse(
        self,
        trajectory: Trajectory,
        batch: DataProto,
        sampling: SamplingConfig,
        *,
        group: str = "",
        sampling_params: Mapping[str, object] | None = None,
        clock: StallClock | None = None,
        calls: list[TurnTimes] | None = None,
    ) -> None:
        """Run one conversation, a batch of one, with an instance of the scheduler class.

        `trajectory` records the sampled turns. Requests may not change `sampling`. TrajectoryError
        when the class raises (chat_scheduler_error) or samples nothing (chat_scheduler_silent).
        """
        session = self.sessions.open_private(
            trajectory,
            sampling=sampling,
            group=group,
            max_response_tokens=self.config.rollout.max_response_tokens,
            max_turns=self.config.rollout.max_turns,
            calls=calls,
        )
        session.clock = clock
        name = f"the chat scheduler {self.config.rollout.chat_scheduler or self.scheduler.__name__}"

        async def hold() -> None:
            scheduler = self.scheduler(self, session)
            await scheduler.generate_sequences(batch, **(sampling_params or {}))

        try:
            seconds, key = self.config.rollout.trajectory_timeout, "rollout.trajectory_timeout"
            await call_user_code(hold, name=name, seconds=seconds, key=key)
        except Exception as raised:
            error = raised
            while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
                error = error.exceptions[0]
            if isinstance(error, TrajectoryError | EngineError | DeadlineError):
                raise error from raised.__cause__
            if not session.refused_turns:  # it may fail where it gets no more turns
                message = await describe_user_error(error)
                raise TrajectoryError("chat_scheduler_error", f"{name}: {message}") from error
        finally:
            self.sessions.close(session.id)
        session.finish()
        if session.lost_turns:
            trajectory.events["lost_turn"] += session.lost_turns
        if not trajectory.turns:
            raise TrajectoryError("chat_scheduler_silent", f"{name} sampled nothing")

    async def generate_sequences(
        self, prompts: DataProto | Sequence[Sequence[Message]], **sampling_params: object
    ) -> DataProto:
        """Run `sampling.n` conversations for each prompt (a list of messages, or a row of
        `raw_prompt`), at most `rollout.concurrency` at once. `sampling_params` change the
        configuration's `sampling`, by its keys or OpenAI's.

        There is a row for each conversation (or for each of its branches), in the prompts' order,
        as in `DataProto.from_trajectories`; `meta_info["dropped"]` counts failed conversations by
        reason. If all fail, the first error is raised.
        """
        if not isinstance(prompts, DataProto):
            prompts = DataProto.from_conversations(prompts)
        if "raw_prompt" not in prompts.non_tensor_batch:
            raise InputError("generate_sequences needs conversations in the column raw_prompt")
        tree = {_SAMPLING_NAMES.get(name, name): value for name, value in sampling_params.items()}
        if unknown := tree.keys() - SamplingConfig.model_fields:
            raise InputError(f"there is no sampling key {min(unknown)}")
        try:
            sampling = SamplingConfig.model_validate(self.config.sampling.model_dump() | tree)
        except ValueError as error:
            raise InputError(f"sampling: {_sentence(error)}") from error
        params = {name: value for name, value in sampling_params.items() if name != "n"}
        failures: list[TurnwiseError] = []
        rollout = self.config.rollout

        async def one(index: int, number: int) -> tuple[int, Trajectory] | None:
            trajectory, row = Trajectory(str(index), number), prompts.row(index)
            limits = trajectory_limits(rollout.trajectory_timeout, rollout.stall_timeout)
            try:
                async with self._slots, limits as clock:
                    await self.converse(
                        trajectory, row, sampling, sampling_params=params, clock=clock
                    )
            except (TrajectoryError, EngineError, DeadlineError) as error:
                failures.append(error)
                return None
            return index, trajectory

        works = (one(i, number) for i in range(len(prompts)) for number in range(sampling.n))
        done = [each for each in await together(works) if each is not None]
        if failures and not done:
            raise failures[0]
        pad = self.tokenizer.pad_token_id
        batch = DataProto.from_trajectories(
            [trajectory for _, trajectory in done],
            [index for index, _ in done],
            self.tokenizer.eos_token_id if pad is None else pad,
        )
        late = {True: "engine_timeout", False: "engine_error"}
        batch.meta_info["dropped"] = Counter(
            getattr(error, "reason", late[isinstance(error, DeadlineError)]) for error in failures
        )
        return batch

    async def _answer(
        self,
        tree: JsonObject,
        headers: Mapping[str, str],
        own: Session | None,
        replies: asyncio.Queue[object],
    ) -> None:
        """Reply with the completion; or with None, a stream's chunks, and None; or an error."""
        from openai.types.chat import ChatCompletion, ChatCompletionChunk  # a second to import

        whole: ChatCompletion | None = None
        try:
            name, previous = headers.get("x-session-id"), headers.get("x-request-id")
            if own is not None:
                name, previous = own.id, None
            elif name is not None and not valid_name(name):
                raise InputError(f"x-session-id: {NAME_RULE}")
            elif name is None and previous and not self.sessions.has_completion(previous):
                raise InputError(
                    f"x-request-id: no completion {previous} is remembered "
                    "(serving.session_idle, serving.session_memory_mb)"
                )
            with self._chats.serving(name, previous) as context:
                answer = await self._chats.answer(tree, context)
                if isinstance(answer, dict):
                    whole = ChatCompletion.model_validate(_checked(answer))
                    context.deliver()
                else:
                    replies.put_nowait(None)
                    async with aclosing(answer) as events:
                        async for event in events:
                            context.deliver()
                            for line in event.splitlines():
                                data = line.removeprefix("data: ")
                                if data not in (line, "[DONE]"):
                                    chunk = _checked(json.loads(data))
                                    replies.put_nowait(ChatCompletionChunk.model_validate(chunk))
            replies.put_nowait(whole)
        except asyncio.CancelledError:  # not always by the caller, who then waits
            replies.put_nowait(EngineError("the chat completion was cancelled"))
            raise
        except Exception as error:  # raised to the caller of `create`
            replies.put_nowait(_own(error))


def _own(error: Exception) -> Exception:
    """Return an error of vLLM's application as ours, and any other one as it is."""
    from turnwise.internals.vllm_server import GracefulHTTPError, VLLMError

    own = error
    if isinstance(error, GracefulHTTPError):
        own = EngineError(str(error))
    elif isinstance(error, (VLLMError, ValueError, TypeError)):
        own = InputError(_sentence(error))
    if own is not error:
        own.__cause__ = error
    return own


def _sentence(error: Exception) -> str:
    """Return an error as one sentence; for pydantic's errors the first, with its key."""
    errors = getattr(error, "errors", None)
    if callable(errors) and (details := errors()):
        key = ".".join(str(part) for part in details[0]["loc"])
        return f"{key}: {details[0]['msg']}" if key else str(details[0]["msg"])
    return first_line(error)


def _checked(tree: JsonObject) -> JsonObject:
    """Return an answer of vLLM's application; raise it if it is an error."""
    if error := tree.get("error"):
        kind = InputError if int(error.get("code") or 500) < 500 else EngineError
        raise kind(str(error.get("message")))
    return tree
