"""The first prompts of rows: what the chat template shows of them, and how long they may be.

No pass over all rows is needed before the first rollout, and no environment is built for a row that
is never played.
"""

import logging
from collections.abc import Sequence

from turnwise.chat.prompts import PromptCache
from turnwise.chat.template import missing_stop
from turnwise.config import LOOP_NAMES, Config
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError, TrajectoryError, describe_error
from turnwise.rollouts.group import TOO_LONG
from turnwise.rollouts.problems import Problem
from turnwise.trajectory import ChatTemplate, Message
from turnwise.trajectory.left_out import check_messages, check_results, check_tools

logger = logging.getLogger(__name__)

_BY_REQUESTS = ("agent", "chat_scheduler")
"""Loops whose prompts come from requests."""
_READING = ("tool_calling", "self_play")
"""Loops in which the model reads results of tools as messages."""


class PromptLimit:
    """Measures first prompts, and leaves out rows with too long a one when they are first seen."""

    def __init__(self, config: Config, prompts: PromptCache) -> None:
        self._prompts = prompts
        self._longest = config.data.max_prompt_tokens
        self._room = config.model.max_length
        self.left_out: dict[str, str] = {}
        """Reasons why problems are left out, by their ids."""

    def length(self, where: str, messages: Sequence[Message], schemas: Sequence[JsonObject]) -> int:
        """Return the number of tokens of a first prompt.

        Raises:
            InputError: naming `where`, when the chat template refuses the messages, or is missing.
        """
        try:
            return len(self._prompts.render(messages, tools=schemas))
        except InputError as error:  # there is no template
            raise InputError(f"{where}: {error}") from error
        except Exception as error:  # a template may raise anything
            raise InputError(
                f"{where}: the chat template refuses the environment's problem: "
                f"{describe_error(error)}"
            ) from error

    def check(self, where: str, length: int) -> None:
        """Refuse a prompt beyond the context that `data.max_prompt_tokens` does not leave out.

        Raises:
            InputError: naming `where`.
        """
        if length >= self._room and not self._beyond_longest(length):
            raise InputError(f"{where}: {self._does_not_fit(length)}")

    def admit(self, where: str, length: int) -> None:
        """Leave out a problem with too long a prompt; the first one is logged as a warning.

        Raises:
            TrajectoryError: `prompt_too_long`.
        """
        if not self._beyond_longest(length) and length < self._room:
            return
        reason = (
            f"its prompt has {length} tokens, more than {self._longest} (data.max_prompt_tokens)"
            if self._beyond_longest(length)
            else self._does_not_fit(length)
        )
        if not self.left_out:
            logger.warning("%s is left out, and so is every such row: %s", where, reason)
        self.left_out[where] = f"{where}: {reason}"
        raise TrajectoryError(TOO_LONG, self.left_out[where])

    def admitted(self, problems: Sequence[Problem], lengths: Sequence[int | None]) -> list[Problem]:
        """Return the problems whose prompt is not too long; their number is logged.

        Args:
            lengths: Length of each problem's prompt, None if it is not known yet.

        Raises:
            InputError: when none is left.
        """
        kept = [
            problem
            for problem, length in zip(problems, lengths, strict=True)
            if length is None or not self._beyond_longest(length)
        ]
        if len(kept) < len(problems):
            too_long = (
                f"{len(problems) - len(kept)} of {len(problems)} rows have prompts of more than "
                f"{self._longest} tokens (data.max_prompt_tokens)"
            )
            if not kept:
                raise InputError(f"{too_long}, and none is left")
            logger.warning("%s and are left out", too_long)
        return kept

    def _beyond_longest(self, length: int) -> bool:
        return self._longest is not None and length > self._longest

    def _does_not_fit(self, length: int) -> str:
        return (
            f"its prompt of {length} tokens does not fit the context of {self._room}; raise "
            "model.max_length, or leave such rows out with data.max_prompt_tokens"
        )


class ShownPrompt:
    """Checks the first row's prompt for what the model would not see, once."""

    def __init__(self, config: Config, template: ChatTemplate) -> None:
        self._config = config
        self._template = template
        self._checked = False
        self.measures = not (template.missing and config.rollout.loop in _BY_REQUESTS)
        """Whether the problems of environments can be rendered as prompts."""

    def offered(self, schemas: Sequence[JsonObject]) -> Sequence[JsonObject]:
        """Return the tools that the chat template gets."""
        rollout = self._config.rollout
        if not rollout.tools_in_prompt or rollout.call_start or rollout.loop == "single_turn":
            return []
        return schemas

    def check(self, where: str, messages: Sequence[Message], schemas: Sequence[JsonObject]) -> None:
        """Check that the template shows messages and tools, and later the results of tools.

        What a loop of the user's own shows is known when it asks for a prompt
        (`RolloutContext.first_prompt`).

        Raises:
            InputError: naming `where`, what the template leaves out, and the keys.
        """
        loop = self._config.rollout.loop
        if self._checked or loop in _BY_REQUESTS:
            return
        try:
            check_messages(self._template, messages)
            offered = self.offered(schemas)
            if offered and loop in LOOP_NAMES:
                check_tools(self._template, messages, offered)
            if schemas and loop in _READING:
                check_results(self._template, offered)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        if stop := missing_stop(self._config, self._template):
            logger.warning("%s", stop)
        self._checked = True
