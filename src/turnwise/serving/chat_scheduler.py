"""Chat completions without HTTP, and the classes of users that hold conversations by them.

`ChatCompletionScheduler` has the methods of verl's class of that name: a request goes in with
OpenAI's keys, and a callback gets the `ChatCompletion` and may submit the next turn. `ChatBackend`
answers it in this process with the same code as the OpenAI server, so sessions keep each
conversation's tokens exactly as they were sampled, and every key means what it means there.

User code runs on an event loop of its own. What it asks for is done on the backend's.
"""

import asyncio
import copy
import inspect
import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from turnwise.config import Config, SamplingConfig
from turnwise.deadlines import StallClock
from turnwise.engine.protocol import Chunk, Completion, Generator, Route, collect
from turnwise.errors import (
    DeadlineError,
    EngineError,
    InputError,
    TrajectoryError,
    TurnwiseError,
)
from turnwise.serving.data_proto import DataProto
from turnwise.serving.sessions import NAME_RULE, Session, SessionStore, valid_name
from turnwise.tasks import call_user_code, describe_user_error, run_in_thread, task_group
from turnwise.trajectory import Message, Trajectory

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    Answer = ChatCompletion | AsyncGenerator[ChatCompletionChunk, None]

_Result = TypeVar("_Result")

Callback = Callable[[Any, dict[str, Any], Exception | None], Any]
"""Gets the `ChatCompletion` (with `stream=True` an iterator of `ChatCompletionChunk`s; None where
it failed), the info that was submitted, and the exception or None. May be async."""


class ChatCompletionScheduler:
    """Holds conversations: the base of the class that `rollout.chat_scheduler` names.

    In a run each trajectory gets an instance of its own, whose `generate_sequences` is called once,
    with that trajectory's conversation. All that it samples becomes the trajectory.

        class TwoRounds(ChatCompletionScheduler):
            async def generate_sequences(self, batch, **sampling_params):
                messages = batch.non_tensor_batch["raw_prompt"][0].tolist()
                await self.submit_chat_completions(
                    self.answered, {"messages": messages}, messages=messages, **sampling_params
                )

            async def answered(self, completions, info, exception):
                ...  # append the answer and the next question, and submit them

    Args:
        chats: Answers the requests.
        session: Takes all that is sampled; without one a request begins a conversation unless
            `extra_headers` names one.
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
        callback_additional_info: dict[str, Any],
        **chat_complete_request: Any,
    ) -> None:
        """Complete a chat, then call `callback(completions, callback_additional_info, exception)`.

        Returns when the callback has returned; what it raises is raised here. It may submit the
        next turn and await it.

        Args:
            callback: Plain or async; runs on the caller's event loop.
            callback_additional_info: Passed to the callback as it is.
            chat_complete_request: As for `chat_completion`.
        """
        completions, exception = None, None
        try:
            completions = await self.chat_completion(**chat_complete_request)
        except Exception as error:  # the callback's to judge
            exception = error
        result = callback(completions, callback_additional_info, exception)
        if inspect.isawaitable(result):
            await result

    async def chat_completion(self, **request: Any) -> "Answer":
        """Answer one chat request.

        Args:
            request: OpenAI's keys, and vLLM's beyond them: `messages`, `model` (any name), `n`,
                `temperature`, `max_tokens`, `tools` ... `extra_body` holds more of them.
                `extra_headers` may hold `x-request-id`, the id of the completion that `messages`
                continue, or `x-session-id`, a conversation's name.

        Returns:
            A `ChatCompletion`. Each choice has `token_ids`, and its message `prompt_token_ids`,
            `generation_token_ids`, `generation_log_probs` and `weight_versions`. With
            `stream=True`: an async generator of `ChatCompletionChunk`s, whose choices have
            `token_ids` where they bring tokens; closing it ends the request.

        Raises:
            InputError: naming the key that cannot be served, or when the prompt is too long.
            EngineError, DeadlineError: when the workers failed.
        """
        return await self._chats.create(request, self._session)

    async def generate_sequences(self, batch: DataProto, **sampling_params: Any) -> Any:
        """Hold the conversations of a batch; here, one answer to each.

        Args:
            batch: `non_tensor_batch["raw_prompt"]` holds arrays of messages; in a run it is one,
                and the other columns are those of the trajectory's row.
            sampling_params: Keys for each request.

        Returns:
            Nothing that is read: what was sampled is recorded.
        """

        def answered(completions: Any, info: Any, exception: Exception | None) -> None:
            if exception is not None:
                raise exception

        async with task_group() as group:
            for messages in batch.non_tensor_batch["raw_prompt"]:
                submitted = self.submit_chat_completions(
                    answered, {}, messages=list(messages), **sampling_params
                )
                group.create_task(submitted)


class ChatBackend:
    """Answers chat requests in this process, by vLLM's application around a generator.

    `create` may be awaited on any event loop, all else on the one of `start`.

    Args:
        config: Model, sampling defaults, tool parser, sizes of sessions.
        generator: One engine, or the scheduler before many.
        scheduler: The class that `converse` and `generate_sequences` use.
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
        self.sessions = SessionStore(
            config.sampling,
            idle_seconds=config.serving.session_idle,
            max_bytes=config.serving.session_memory_mb << 20,
        )
        self._generator = generator
        self._slots = asyncio.Semaphore(config.rollout.concurrency)

    async def start(self) -> None:
        """Build vLLM's application.

        Raises:
            InputError: when vLLM refuses the model.
        """
        server, self._request_type = await run_in_thread(_import_server)
        self._server = server
        self._loop = asyncio.get_running_loop()
        generator = self._generator
        if (most := self.config.rollout.max_response_tokens) is not None:
            generator = _Bounded(generator, self.sessions, most)
        app = await server.build(
            self.config,
            generator,
            lambda: True,
            self.sessions.remember_completion,
            [self.model_name],
        )
        self._app = app
        self._chat = app.state.openai_serving_chat
        self.tokenizer = self._chat.renderer.tokenizer

    async def stop(self) -> None:
        """End its tasks."""
        if hasattr(self, "_chat"):
            self._chat.engine_client.shutdown()

    async def create(self, request: Mapping[str, Any], session: Session | None = None) -> "Answer":
        """See `ChatCompletionScheduler.chat_completion`."""
        asked, headers = self._checked(request)
        said: asyncio.Queue[Any] = asyncio.Queue()
        running = asyncio.run_coroutine_threadsafe(
            self._run(asked, headers, session, said), self._loop
        )
        try:
            first = await self._at_home(said.get())
        except asyncio.CancelledError:
            running.cancel()
            raise
        if isinstance(first, Exception):
            raise first
        if not asked.stream:
            completion: ChatCompletion = first
            return completion

        async def chunks() -> AsyncGenerator["ChatCompletionChunk", None]:
            try:
                while (piece := await self._at_home(said.get())) is not None:
                    if isinstance(piece, Exception):
                        raise piece
                    yield piece
            finally:
                running.cancel()

        return chunks()

    async def converse(
        self,
        trajectory: Trajectory,
        batch: DataProto,
        sampling: SamplingConfig,
        *,
        group: str = "",
        sampling_params: Mapping[str, Any] | None = None,
        clock: StallClock | None = None,
    ) -> None:
        """Have an instance of the scheduler class hold one conversation, as user code.

        Args:
            trajectory: Takes what is sampled.
            batch: The conversation, as a batch of one.
            sampling: The sampling that requests have to keep to.
            group: Trajectories that begin with the same prompt.
            sampling_params: For `generate_sequences`.
            clock: Stands still while a request is in flight.

        Raises:
            TrajectoryError: when the class raised (chat_scheduler_error), or sampled nothing
                (chat_scheduler_silent).
            EngineError, DeadlineError: when the workers failed.
        """
        session = self.sessions.open_private(trajectory, sampling=sampling, group=group)
        session.clock = clock
        name = f"the chat scheduler {self.config.rollout.chat_scheduler or self.scheduler.__name__}"

        async def hold() -> None:
            scheduler = self.scheduler(self, session)
            await scheduler.generate_sequences(batch, **(sampling_params or {}))

        try:
            await call_user_code(hold, name=name)
        except Exception as raised:
            error = _only(raised)
            if isinstance(error, TrajectoryError | EngineError | DeadlineError):
                raise error from raised.__cause__
            said = await describe_user_error(error)
            raise TrajectoryError("chat_scheduler_error", f"{name}: {said}") from error
        finally:
            self.sessions.close(session.id)
        session.finish()
        if session.lost_turns:
            trajectory.events["lost_turn"] += session.lost_turns
        if not trajectory.turns:
            raise TrajectoryError("chat_scheduler_silent", f"{name} sampled nothing")

    async def generate_sequences(
        self, prompts: DataProto | Sequence[Sequence[Message]], **sampling_params: Any
    ) -> DataProto:
        """Hold `sampling.n` conversations for each prompt, `rollout.concurrency` at once.

        Args:
            prompts: Conversations, in `non_tensor_batch["raw_prompt"]` or as lists of messages.
            sampling_params: What differs from the configuration's `sampling`, by its keys or
                OpenAI's.

        Returns:
            A row for each conversation (for each branch, where it has several), by prompt, as in
            `DataProto.from_trajectories`; `meta_info["dropped"]` counts the conversations that
            failed, by reason.

        Raises:
            InputError: for an unknown sampling key.
            TrajectoryError, EngineError, DeadlineError: the first one, when all failed.
        """
        if not isinstance(prompts, DataProto):
            prompts = DataProto.from_conversations(prompts)
        if "raw_prompt" not in prompts.non_tensor_batch:
            raise InputError("generate_sequences wants conversations in the column raw_prompt")
        sampling = _sampling(self.config.sampling, sampling_params)
        params = {name: value for name, value in sampling_params.items() if name != "n"}
        failures: list[TurnwiseError] = []

        async def one(index: int, number: int) -> Trajectory | None:
            trajectory, rollout = Trajectory(str(index), number), self.config.rollout
            clock, seconds = StallClock(rollout.stall_timeout), rollout.trajectory_timeout
            try:
                async with self._slots, asyncio.timeout(seconds), clock.watching() as stall:
                    await self.converse(
                        trajectory,
                        prompts.row(index),
                        sampling,
                        sampling_params=params,
                        clock=clock,
                    )
            except TimeoutError:
                stalled = f"nothing of it moved for {clock.seconds:g} s (rollout.stall_timeout)"
                failure = TrajectoryError("trajectory_timeout", f"not done after {seconds:g} s")
                if stall.expired():
                    failure = TrajectoryError("stalled", stalled)
                failures.append(failure)
            except (TrajectoryError, EngineError, DeadlineError) as error:
                failures.append(error)
            else:
                return trajectory
            return None

        places = [(i, number) for i in range(len(prompts)) for number in range(sampling.n)]
        async with task_group() as group:
            running = [group.create_task(one(*place)) for place in places]
        held = [task.result() for task in running]
        done = [(place[0], t) for place, t in zip(places, held, strict=True) if t is not None]
        if failures and not done:
            raise failures[0]
        pad = self.tokenizer.pad_token_id
        made = DataProto.from_trajectories(
            [trajectory for _, trajectory in done],
            [index for index, _ in done],
            self.tokenizer.eos_token_id if pad is None else pad,
        )
        made.meta_info["dropped"] = Counter(map(_reason, failures))
        return made

    async def _at_home(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Await what belongs to the backend's event loop, on whichever loop this is."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _checked(self, request: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
        """The request as vLLM's, and its headers.

        Raises:
            InputError: naming the key that is unknown or whose value does not fit.
        """
        request = {**request, **(request.get("extra_body") or {})}
        request.pop("extra_body", None)
        given = request.pop("extra_headers", None) or {}
        headers = {name.lower(): str(value) for name, value in given.items()}
        if unknown := headers.keys() - {"x-request-id", "x-session-id"}:
            raise InputError(
                f"extra_headers takes x-request-id and x-session-id, and not {min(unknown)}"
            )
        known = self._request_type.model_fields
        if unknown := request.keys() - known:
            raise InputError(f"a chat completion's request has no key {min(unknown)}")
        request["messages"] = [_plain(message) for message in request.get("messages", ())]
        try:
            asked = self._request_type(**request)
        except ValueError as error:
            raise InputError(_first_line(error)) from error
        asked.return_token_ids = True
        return asked, headers

    @contextmanager
    def _held(self, headers: Mapping[str, str], own: Session | None) -> Iterator[Session]:
        """The request's session, while it runs.

        Raises:
            InputError: when it is over, or there is no such completion or session.
        """
        name, previous = headers.get("x-session-id"), headers.get("x-request-id")
        if own is not None:
            name, previous = own.id, None
        elif name is not None and not valid_name(name):
            raise InputError(f"x-session-id: {NAME_RULE}")
        elif name is None and previous and not self.sessions.has_completion(previous):
            raise InputError(
                f"x-request-id: no completion {previous} is remembered (serving.session_idle, "
                "serving.session_memory_mb)"
            )
        if name is not None and (why := self.sessions.gone(name)) is not None:
            raise InputError(f"the conversation {name} {why}")
        with self.sessions.request(name, previous) as session:
            yield session

    async def _run(
        self,
        asked: Any,
        headers: Mapping[str, str],
        own: Session | None,
        said: "asyncio.Queue[Any]",
    ) -> None:
        """Answer a request into `said`: a completion, or an error, or None and then the chunks of
        a stream and None."""
        from starlette.requests import Request

        raw = Request({"type": "http", "headers": [], "app": self._app})
        try:
            with self._held(headers, own) as session:
                self._server.CALL.set(self._server.Call(session))  # in this task's context
                answer = await self._chat.create_chat_completion(asked, raw)
                if not isinstance(answer, AsyncGenerator):
                    said.put_nowait(_completion(answer.model_dump()))
                    return
                said.put_nowait(None)
                async with aclosing(answer) as events:
                    async for event in events:
                        for chunk in _chunks(event):
                            said.put_nowait(chunk)
            said.put_nowait(None)
        except Exception as error:  # for the one who asked
            said.put_nowait(self._ours(error))

    def _ours(self, error: Exception) -> Exception:
        if isinstance(error, TurnwiseError):
            return error
        if isinstance(error, self._server.GracefulHTTPError):
            return EngineError(str(error))
        if isinstance(error, self._server.VLLMError | ValueError | TypeError):
            return InputError(_first_line(error))
        return error


class _Bounded:
    """A generator that holds each rollout to `rollout.max_response_tokens`: what is left of them
    after the earlier rounds bounds a turn."""

    def __init__(self, generator: Generator, sessions: SessionStore, most: int) -> None:
        self._generator = generator
        self._sessions = sessions
        self._most = most

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingConfig,
        request_id: str,
        seed: int | None = None,
        route: Route | None = None,
    ) -> Completion:
        stream = self.stream(prompt_token_ids, sampling, request_id, seed, route)
        return await collect(stream, request_id)

    async def stream(
        self,
        prompt_token_ids: Sequence[int],
        sampling: Any,
        request_id: str,
        seed: int | None = None,
        route: Route | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        session = self._sessions.get(route.session) if route is not None else None
        if session is not None and session.private:
            turns = session.trajectory.turns
            first = len(turns[0].added_token_ids) if turns else len(prompt_token_ids)
            room = first + self._most - len(prompt_token_ids)
            if room <= 0:
                raise InputError(
                    f"the conversation has used up its {self._most} tokens "
                    "(rollout.max_response_tokens)"
                )
            if sampling.max_tokens > room:
                sampling = copy.copy(sampling)
                sampling.max_tokens = room
                sampling.min_tokens = min(sampling.min_tokens, room)
        stream = self._generator.stream(prompt_token_ids, sampling, request_id, seed, route)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                yield chunk


def _import_server() -> tuple[Any, Any]:
    """vLLM's application, which takes seconds to import, and its requests' type."""
    from turnwise.engine.vllm_names import ChatCompletionRequest
    from turnwise.serving import vllm_server

    return vllm_server, ChatCompletionRequest


def _plain(message: Any) -> Any:
    """A message as a dictionary; OpenAI's client takes its own objects too."""
    return message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else message


def _completion(tree: dict[str, Any]) -> Any:
    from openai.types.chat import ChatCompletion  # a second to import

    _raise_if_error(tree)
    return ChatCompletion.model_validate(tree)


def _chunks(event: str) -> "Iterator[ChatCompletionChunk]":
    """The chunks in an event of vLLM's stream."""
    from openai.types.chat import ChatCompletionChunk

    for line in event.splitlines():
        data = line.removeprefix("data: ")
        if data != line and data != "[DONE]":
            tree = json.loads(data)
            _raise_if_error(tree)
            yield ChatCompletionChunk.model_validate(tree)


def _raise_if_error(tree: dict[str, Any]) -> None:
    error = tree.get("error")
    if error:
        kind = InputError if int(error.get("code") or 500) < 500 else EngineError
        raise kind(str(error.get("message")))


def _first_line(error: Exception) -> str:
    """One sentence of an error, pydantic's with the key that it is about."""
    errors = getattr(error, "errors", None)
    if callable(errors) and (details := errors()):
        key = ".".join(str(part) for part in details[0]["loc"])
        return f"{key}: {details[0]['msg']}" if key else str(details[0]["msg"])
    return str(error).strip().partition("\n")[0]


def _only(error: Exception) -> Exception:
    """The error itself where a task group raised one alone."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _reason(error: TurnwiseError) -> str:
    if isinstance(error, TrajectoryError):
        return error.reason
    return "engine_timeout" if isinstance(error, DeadlineError) else "engine_error"


def _sampling(base: SamplingConfig, changes: Mapping[str, Any]) -> SamplingConfig:
    """The configuration's sampling with a caller's changes, by our keys or OpenAI's."""
    names = {"max_completion_tokens": "max_tokens", "vllm_xargs": "logits_processor_args"}
    tree = {names.get(name, name): value for name, value in changes.items()}
    if unknown := tree.keys() - SamplingConfig.model_fields:
        raise InputError(f"there is no sampling key {min(unknown)}")
    try:
        return SamplingConfig.model_validate(base.model_dump() | tree)
    except ValueError as error:
        raise InputError(f"sampling: {_first_line(error)}") from error
