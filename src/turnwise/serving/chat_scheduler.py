"""Users' classes that lead conversations with chat completions, without HTTP.

`ChatCompletionScheduler` has the methods of verl's class of that name: a request has
OpenAI's keys, and a callback gets the `ChatCompletion` and may submit the next turn. `ChatBackend`
answers in this process. User code runs on its own event loop, and its requests on the backend's.
"""

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias

from turnwise.chat.session import Session
from turnwise.core.aio import task_group
from turnwise.core.json_types import JsonObject
from turnwise.serving.data_proto import DataProto

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    from turnwise.serving.chat_backend import ChatBackend

    Completions: TypeAlias = ChatCompletion | AsyncGenerator[ChatCompletionChunk, None]

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

        Returns when the callback has returned, and raises its exception. The callback may submit
        the next turn and await it.

        Args:
            callback: Plain or async; runs on the caller's event loop.
            callback_additional_info: Passed to the callback unchanged.
            chat_complete_request: As for `chat_completion`.
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

        async with task_group() as group:
            for messages in batch.non_tensor_batch["raw_prompt"]:
                submitted = self.submit_chat_completions(
                    answered, {}, messages=list(messages), **sampling_params
                )
                group.create_task(submitted)
        return None
