"""A simulated user: a second model, behind an OpenAI-compatible URL, that plays the user.

An environment's `step` returns the answers of the simulated user. They reach the policy as messages
of the user, so their tokens are part of the prompt and are never trained.
"""

from collections import Counter
from collections.abc import Mapping

from turnwise.core.endpoint import Endpoint
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollouts.chat_endpoint import complete
from turnwise.trajectory import Message
from turnwise.trajectory.prefix import without_reasoning

GREETING = "Hello! How can I help you?"


class SimulatedUser:
    """The user of one trajectory, played by a model behind an OpenAI-compatible URL.

    The model sees the conversation with the roles swapped: `instructions` as the system's message,
    the policy's answers as messages of the user, and its own answers as messages of the assistant.
    Reasoning is left out on both sides. After a connection error or a status 408, 409, 429 or 5xx,
    the request is sent again, with growing pauses or after the time that the server gives.

    Args:
        base_url: URL up to and including `/v1`, of any server of Chat Completions.
        model: Name of the model on that server.
        instructions: Who the user is, and what they want.
        opening: The user's first message, equal to the environment's `problem`. Without an opening,
            `open` lets the model write the first message.
        stop: Phrase with which the user ends the conversation, and which `instructions` asks for.
        max_calls: Maximum number of answers in this trajectory, including the answer of `open`.
        max_tokens: Maximum number of tokens in this trajectory, including prompts; None means no
            limit.
        timeout: Seconds for one answer, including retries; keep it below
            `rollout.environment_timeout`.
        retries: Number of further attempts after an unusable answer; a server that cannot be
            reached is tried until `timeout`. With 0, there is only one attempt.
        api_key_variable: Name of the environment variable with the server's API key; None sends no
            key.
        request: Further parameters of the request, such as `{"temperature": 0.7}`.

    Raises:
        InputError: when an argument cannot be used, or the variable is not set.

    Example:
        class Desk(turnwise.Environment):
            def __init__(self, row: dict[str, str]) -> None:
                self.problem = row["complaint"]
                self.user = turnwise.SimulatedUser(
                    "http://127.0.0.1:8000/v1",
                    "any",
                    f"You want {row['wish']}. Once you have it, write DONE.",
                    opening=self.problem,
                    stop="DONE",
                )

            async def step(self, message: Message) -> str | None:
                return await self.user.answer(message)

            def reward(self, trajectory: Trajectory) -> float:
                return float(self.user.ended_by == "stop")
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        instructions: str,
        *,
        opening: str | None = None,
        stop: str | None = None,
        max_calls: int = 20,
        max_tokens: int | None = None,
        timeout: float = 60.0,
        retries: int = 4,
        api_key_variable: str | None = None,
        request: Mapping[str, object] | None = None,
    ) -> None:
        is_url = base_url.startswith(("http://", "https://"))
        for right, rule, value in (
            (is_url, "base_url must begin with http:// or https://", base_url),
            (stop != "", "stop must be a phrase", stop),
            (max_calls > 0, "max_calls must be at least 1", max_calls),
            (max_tokens is None or max_tokens > 0, "max_tokens must be at least 1", max_tokens),
            (timeout > 0, "timeout must be more than 0", timeout),
            (retries >= 0, "retries must be at least 0", retries),
        ):
            if not right:
                raise InputError(f"SimulatedUser: {rule}, not {value!r}")
        self._endpoint = Endpoint(
            base_url,
            model,
            who="the simulated user",
            reason="simulated_user",
            timeout=timeout,
            retries=retries,
            api_key_variable=api_key_variable,
        )
        self.model = model
        self.calls = 0
        """Number of answers so far."""
        self.tokens = 0
        """Number of tokens so far, including prompts, as the server counts them."""
        self.ended_by: str | None = None
        """Reason why the conversation ended: "stop" or "budget"; None before its end."""
        self.messages: list[Message] = [{"role": "system", "content": instructions}]
        """The conversation as the model that plays the user sees it."""
        if opening is not None:
            self._record(GREETING, opening)
        self._stop = stop
        self._max_calls, self._max_tokens = max_calls, max_tokens
        self._request = dict(request or {})

    async def open(self) -> str:
        """Return the user's first message, for `problem`; call it in an async `setup`.

        Raises:
            TrajectoryError: as by `answer`; also if the first message ends the conversation.
        """
        opening = await self._answer(GREETING)
        if opening is None:
            message = f"{self} ended the conversation with its first message"
            raise TrajectoryError("simulated_user_error", message)
        return opening

    async def answer(self, message: Message) -> str | None:
        """Return the user's answer to a message of the policy; None ends the conversation.

        Once a budget is used up, or the user has ended the conversation, this returns None without
        a request; `ended_by` has the reason.

        Raises:
            TrajectoryError: `simulated_user_timeout` or `simulated_user_error`, with the server's
                error message.
        """
        return await self._answer(str(message.get("content") or ""))

    def metrics(self) -> dict[str, float]:
        """Return the numbers of calls and tokens, and the reason of the end, for `metrics`."""
        return {
            "user_calls": self.calls,
            "user_tokens": self.tokens,
            "user_stopped": self.ended_by == "stop",
            "user_out_of_budget": self.ended_by == "budget",
        }

    async def _answer(self, said: str) -> str | None:
        out_of_tokens = self._max_tokens is not None and self.tokens >= self._max_tokens
        if self.ended_by is None and (self.calls >= self._max_calls or out_of_tokens):
            self.ended_by = "budget"
        if self.ended_by is not None:
            return None
        said, spent = without_reasoning(said), Counter[str]()
        messages = [*self.messages, {"role": "user", "content": said}]
        body = {**self._request, "messages": messages}
        text, ended = await complete(self._endpoint, body, spent)
        self.calls += 1
        self.tokens += spent["prompt_tokens"] + spent["completion_tokens"]
        if not (text := text.strip()):
            message = f"{self} answered without a text (finish_reason {ended})"
            raise TrajectoryError("simulated_user_error", message)
        self._record(said, text)
        if self._stop is not None and self._stop in text:
            self.ended_by = "stop"
            return None
        return text

    def _record(self, said: str, answer: str) -> None:
        self.messages.append({"role": "user", "content": said})
        self.messages.append({"role": "assistant", "content": answer})

    def __str__(self) -> str:
        return str(self._endpoint)
