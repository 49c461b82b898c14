"""Chat completions without HTTP, answered in this process by the OpenAI server's own code.

Sessions keep each conversation's tokens exactly as they were sampled, and every key of a request
means the same as over HTTP. The backend also runs batches of conversations and returns tensors.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, TypeVar

from turnwise.chat.session import NAME_RULE, Session, valid_name
from turnwise.chat.session_store import SessionStore
from turnwise.config import Config, SamplingConfig
from turnwise.core.aio import run_in_thread, task_group
from turnwise.core.deadlines import StallClock
from turnwise.core.user_code import call_user_code, describe_user_error
from turnwise.engine.protocol import Generator, TurnTimes
from turnwise.errors import (
    DeadlineError,
    EngineError,
    InputError,
    TrajectoryError,
    TurnwiseError,
)
from turnwise.serving.chat_request import (
    chunks_of,
    completion_of,
    own_errors,
    parse_request,
    parse_sampling,
)
from turnwise.serving.chat_scheduler import ChatCompletionScheduler
from turnwise.serving.data_proto import DataProto
from turnwise.serving.openai.request_context import CURRENT, RequestContext
from turnwise.trajectory import Message, Trajectory

if TYPE_CHECKING:
    from types import ModuleType

    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    from turnwise.serving.chat_scheduler import Completions
    from turnwise.serving.openai.vllm_api import ChatCompletionRequest, ChatCompletionResponse

_Result = TypeVar("_Result")


class ChatBackend:
    """Answers chat requests in this process.

    `create` may be awaited on any event loop, all other methods only on the loop of `start`.

    Args:
        config: Model, sampling defaults, tool parser, sizes of sessions.
        generator: One engine, or the scheduler of several.
        scheduler: Class that `converse` and `generate_sequences` use.

    Example:
        >>> backend = ChatBackend(config, engine)
        >>> await backend.start()
        >>> answer = await backend.create({"messages": [{"role": "user", "content": "2 + 2?"}]})
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
        """Build vLLM's application.

        Raises:
            InputError: when vLLM refuses the model.
        """
        vllm_app = await run_in_thread(_import_app)
        self._loop = asyncio.get_running_loop()
        self._app = await vllm_app.build(
            self.config,
            self._generator,
            lambda: True,
            self.sessions.remember_completion,
            [self.model_name],
        )
        self._chat = self._app.state.openai_serving_chat
        self.tokenizer = self._chat.renderer.tokenizer

    async def stop(self) -> None:
        """Cancel the application's tasks."""
        if hasattr(self, "_chat"):
            self._chat.engine_client.shutdown()

    async def create(
        self, request: Mapping[str, object], session: Session | None = None
    ) -> "Completions":
        """Answer one request; see `ChatCompletionScheduler.chat_completion`."""
        parsed, headers = parse_request(request)
        if not parsed.stream:
            return await self._on_own_loop(self._complete(parsed, headers, session))
        replies: asyncio.Queue[ChatCompletionChunk | Exception | None] = asyncio.Queue()
        running = asyncio.run_coroutine_threadsafe(
            self._stream(parsed, headers, session, replies), self._loop
        )
        try:
            first = await self._on_own_loop(replies.get())
        except asyncio.CancelledError:
            running.cancel()
            raise
        if isinstance(first, Exception):
            raise first

        async def chunks() -> AsyncGenerator["ChatCompletionChunk", None]:
            try:
                while (piece := await self._on_own_loop(replies.get())) is not None:
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
        sampling_params: Mapping[str, object] | None = None,
        clock: StallClock | None = None,
        calls: list[TurnTimes] | None = None,
    ) -> None:
        """Run one conversation with an instance of the scheduler class, as user code.

        Args:
            trajectory: Records the sampled turns.
            batch: The conversation, as a batch of one.
            sampling: Sampling that requests may not change.
            group: Name shared by trajectories that begin with the same prompt.
            sampling_params: Passed to `generate_sequences`.
            clock: Held while a request is in flight.
            calls: The list to which the times of the turns are added; None records none.

        Raises:
            TrajectoryError: when the class raises (chat_scheduler_error) or samples nothing
                (chat_scheduler_silent).
            EngineError, DeadlineError: when the workers fail.
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
            error = _only(raised)
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
        """Run `sampling.n` conversations for each prompt, at most `rollout.concurrency` at once.

        Args:
            prompts: Conversations, in `non_tensor_batch["raw_prompt"]` or as lists of messages.
            sampling_params: Changes to the configuration's `sampling`, by its keys or OpenAI's.

        Returns:
            A row for each conversation (or for each of its branches), in the prompts' order, as in
            `DataProto.from_trajectories`; `meta_info["dropped"]` counts failed conversations by
            reason.

        Raises:
            InputError: for an unknown sampling key.
            TrajectoryError, EngineError, DeadlineError: the first error, when all failed.
        """
        if not isinstance(prompts, DataProto):
            prompts = DataProto.from_conversations(prompts)
        if "raw_prompt" not in prompts.non_tensor_batch:
            raise InputError("generate_sequences needs conversations in the column raw_prompt")
        sampling = parse_sampling(self.config.sampling, sampling_params)
        params = {name: value for name, value in sampling_params.items() if name != "n"}
        failures: list[TurnwiseError] = []

        async def one(index: int, number: int) -> Trajectory | None:
            trajectory = Trajectory(str(index), number)
            try:
                await self._converse_in_time(trajectory, prompts.row(index), sampling, params)
            except (TrajectoryError, EngineError, DeadlineError) as error:
                failures.append(error)
                return None
            return trajectory

        places = [(i, number) for i in range(len(prompts)) for number in range(sampling.n)]
        async with task_group() as group:
            running = [group.create_task(one(*place)) for place in places]
        held = [task.result() for task in running]
        done = [(place[0], t) for place, t in zip(places, held, strict=True) if t is not None]
        if failures and not done:
            raise failures[0]
        pad = self.tokenizer.pad_token_id
        batch = DataProto.from_trajectories(
            [trajectory for _, trajectory in done],
            [index for index, _ in done],
            self.tokenizer.eos_token_id if pad is None else pad,
        )
        batch.meta_info["dropped"] = Counter(map(_reason, failures))
        return batch

    async def _converse_in_time(
        self,
        trajectory: Trajectory,
        batch: DataProto,
        sampling: SamplingConfig,
        params: Mapping[str, object],
    ) -> None:
        """Run one conversation within the trajectory's deadlines, once a slot is free.

        Raises:
            TrajectoryError: reason trajectory_timeout or stalled, or see `converse`.
        """
        seconds = self.config.rollout.trajectory_timeout
        clock = StallClock(self.config.rollout.stall_timeout)
        try:
            async with self._slots, asyncio.timeout(seconds), clock.watching() as stall:
                await self.converse(
                    trajectory, batch, sampling, sampling_params=params, clock=clock
                )
        except TimeoutError as error:
            if stall.expired():
                raise TrajectoryError(
                    "stalled",
                    f"it made no progress for {clock.seconds:g} s (rollout.stall_timeout)",
                ) from error
            raise TrajectoryError("trajectory_timeout", f"not done after {seconds:g} s") from error

    async def _on_own_loop(self, work: Coroutine[object, object, _Result]) -> _Result:
        """Run a coroutine on the backend's event loop and await it on the current one."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    @contextmanager
    def _held_session(
        self, headers: Mapping[str, str], own: Session | None
    ) -> Iterator[RequestContext]:
        """Keep the request's session open, and set `CURRENT`, while the request runs.

        Raises:
            InputError: when the session has ended, or the completion or session does not exist.
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
            context = RequestContext(session)
            CURRENT.set(context)  # in this task's context
            try:
                yield context
            finally:
                context.drop()

    async def _complete(
        self, parsed: "ChatCompletionRequest", headers: Mapping[str, str], own: Session | None
    ) -> "ChatCompletion":
        """Answer a request that is not streamed."""
        with own_errors(), self._held_session(headers, own) as context:
            answer = await self._ask(parsed)
            assert not isinstance(answer, AsyncGenerator)
            completion = completion_of(answer.model_dump())
            context.deliver()
            return completion

    async def _stream(
        self,
        parsed: "ChatCompletionRequest",
        headers: Mapping[str, str],
        own: Session | None,
        replies: "asyncio.Queue[ChatCompletionChunk | Exception | None]",
    ) -> None:
        """Stream an answer into a queue: None at the start, the chunks, then None or an error."""
        try:
            with own_errors(), self._held_session(headers, own) as context:
                answer = await self._ask(parsed)
                if not isinstance(answer, AsyncGenerator):
                    completion_of(answer.model_dump())  # raises the error that it holds
                replies.put_nowait(None)
                async with aclosing(answer) as events:
                    async for event in events:
                        context.deliver()
                        for chunk in chunks_of(event):
                            replies.put_nowait(chunk)
            replies.put_nowait(None)
        except Exception as error:  # raised to the caller of `create`
            replies.put_nowait(error)

    async def _ask(
        self, parsed: "ChatCompletionRequest"
    ) -> "ChatCompletionResponse | AsyncGenerator[str, None]":
        from starlette.requests import Request

        raw = Request({"type": "http", "headers": [], "app": self._app})
        return await self._chat.create_chat_completion(parsed, raw)


def _import_app() -> "ModuleType":
    """Import vLLM's application, which takes seconds."""
    from turnwise.serving.openai import vllm_app

    return vllm_app


def _only(error: Exception) -> Exception:
    """Return the error itself if a task group raised only one."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _reason(error: TurnwiseError) -> str:
    if isinstance(error, TrajectoryError):
        return error.reason
    return "engine_timeout" if isinstance(error, DeadlineError) else "engine_error"
