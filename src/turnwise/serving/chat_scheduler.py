"""Chat completions straight from the scheduler, without HTTP between.

Messages in, OpenAI's `ChatCompletion` out; sessions make prompts exact as they do in the server.
Callbacks are for callers that keep many conversations going without coroutines of their own.
"""

import asyncio
import inspect
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from turnwise.config import Config, SamplingConfig
from turnwise.engine.protocol import Generator, Route
from turnwise.errors import EngineError, InputError, TrajectoryError
from turnwise.serving.sessions import Prompt, Session, SessionStore, answer, plain
from turnwise.serving.template import load_template, off_loop
from turnwise.serving.tool_parser import ToolParser
from turnwise.trajectory import Message

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

logger = logging.getLogger(__name__)

Callback = Callable[["ChatCompletion | None", dict[str, Any], Exception | None], Any]
"""Gets the completion (or None), the info that was submitted, and the exception (or None)."""


class ChatScheduler:
    """Completes chats on the workers behind a scheduler.

    Args:
        config: Sampling defaults, the context's length, the tool parser.
        generator: The scheduler, or one engine.
        tokenizer: The model's.
    """

    def __init__(self, config: Config, generator: Generator, tokenizer: Any) -> None:
        self.sessions = SessionStore(config.sampling)
        self._config = config
        self._generator = generator
        self._template = load_template(config, tokenizer)
        self._parser = ToolParser(config.rollout.tool_parser, tokenizer)
        self._running: set[asyncio.Task[None]] = set()

    def submit_chat_completions(
        self,
        messages: Sequence[Message],
        callback: Callback,
        info: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> "asyncio.Task[None]":
        """Complete a chat in the background, then call `callback(completion, info, exception)`.

        The callback may be a coroutine function, and may submit the next turn. `info` may hold
        `session` and `group`. What the callback raises is in the returned task.
        """
        told = info if info is not None else {}

        async def run() -> None:
            completion, exception = None, None
            try:
                completion = await self.chat_completion(
                    messages,
                    session=told.get("session"),
                    group=told.get("group", ""),
                    **sampling,
                )
            except Exception as error:  # the callback's to judge
                exception = error
            result = callback(completion, told, exception)
            if inspect.isawaitable(result):
                await result

        task = asyncio.create_task(run())
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a completion's callback raised %r", error)

    async def wait(self) -> None:
        """Until nothing that was submitted is under way, turns that callbacks submit included."""
        while self._running:
            await asyncio.gather(*self._running, return_exceptions=True)

    async def chat_completion(
        self,
        messages: Sequence[Message],
        *,
        session: str | None = None,
        group: str = "",
        tools: Sequence[dict[str, Any]] | None = None,
        **sampling: Any,
    ) -> "ChatCompletion":
        """One assistant turn.

        Args:
            session: Names the trajectory; its turns are bridged to exact ids.
            group: Trajectories that begin with the same prompt.
            sampling: Keys of `SamplingConfig` that differ from the configuration's.

        Raises:
            InputError: for an unknown key, or a prompt that leaves no room.
            TrajectoryError: when the template refuses the conversation or drops a message.
            EngineError, DeadlineError: when the workers failed.
        """
        home = self.sessions.of_request(session, None)
        if group and not home.group:
            home.group = group
        settings = self._sampling(sampling)
        prompt_token_ids, prompt = await self._prompt(home, messages, tools)
        room = self._config.model.max_length - len(prompt_token_ids)
        if room <= 0:
            raise InputError(
                f"the prompt of {len(prompt_token_ids)} tokens leaves no room in the context of "
                f"{self._config.model.max_length}"
            )
        if settings.max_tokens > room:
            changes = {"max_tokens": room, "min_tokens": min(settings.min_tokens, room)}
            settings = settings.model_copy(update=changes)
        name = f"chatcmpl-{uuid.uuid4().hex}"
        completion = await self._generator.generate(
            prompt_token_ids, settings, name, route=Route(home.id, home.group)
        )
        if completion.finish_reason == "abort":
            raise EngineError(f"{name} was aborted by its engine")
        parsed = self._parser.parse(self._template.decode(completion.token_ids), tools or ())
        said = answer(parsed.content, [(call.name, call.arguments) for call in parsed.calls])
        home.record(
            prompt_token_ids,
            completion.token_ids,
            completion.logprobs,
            completion.weight_versions,
            completion.finish_reason,
            messages=messages,
            tools=tools,
            answer=lambda: said,
            prompt=prompt,
        )
        self.sessions.remember_completion(name, home)
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in parsed.calls
            ]
        return self._completion(name, prompt_token_ids, completion, message)

    def _sampling(self, changes: dict[str, Any]) -> SamplingConfig:
        known = SamplingConfig.model_fields.keys()
        if unknown := changes.keys() - known:
            raise InputError(f"there is no sampling key {sorted(unknown)[0]}")
        tree = self._config.sampling.model_dump() | {"min_tokens": 0} | changes
        try:
            return SamplingConfig.model_validate(tree | {"n": 1})
        except ValueError as error:
            raise InputError(f"sampling: {error}") from error

    async def _prompt(
        self, session: Session, messages: Sequence[Message], tools: Any
    ) -> tuple[list[int], Prompt]:
        prompt = await off_loop(
            messages, lambda: session.next_prompt(messages, tools, self._template)
        )
        if prompt.token_ids is not None:
            return prompt.token_ids, prompt
        if prompt.fork_reason == "message_dropped":
            raise TrajectoryError("message_dropped", "the chat template leaves out a message")
        rendered = [plain(message) for message in messages]
        try:
            ids = await off_loop(messages, lambda: self._template.render(rendered, tools=tools))
        except Exception as error:  # a template may raise anything
            raise TrajectoryError("template_refuses", f"{type(error).__name__}: {error}") from error
        return ids, prompt

    def _completion(
        self, name: str, prompt_token_ids: list[int], completion: Any, message: Message
    ) -> "ChatCompletion":
        from openai.types.chat import ChatCompletion  # a second to import

        called = "tool_calls" in message and completion.finish_reason == "stop"
        count, sampled = len(prompt_token_ids), len(completion.token_ids)
        return ChatCompletion.model_validate(
            {
                "id": name,
                "object": "chat.completion",
                "created": int(time.time()),
                "model": self._config.model.path,
                "choices": [
                    {
                        "index": 0,
                        "message": message
                        | {
                            "prompt_token_ids": prompt_token_ids,
                            "generation_token_ids": completion.token_ids,
                            "generation_log_probs": completion.logprobs,
                            "weight_versions": completion.weight_versions,
                        },
                        "finish_reason": "tool_calls" if called else completion.finish_reason,
                        "logprobs": None,
                    }
                ],
                "usage": {
                    "prompt_tokens": count,
                    "completion_tokens": sampled,
                    "total_tokens": count + sampled,
                },
            }
        )
