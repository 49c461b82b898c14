"""The limit on prompts: rows whose prompt is too long are left out when they are first seen.

No pass over all rows is needed before the first rollout, and no environment is built for a row that
is never played.
"""

import logging
from collections.abc import Sequence

from turnwise.chat.prompts import PromptCache
from turnwise.config import Config
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError, TrajectoryError, describe_error
from turnwise.rollout.group import TOO_LONG
from turnwise.rollout.problems import Problem
from turnwise.trajectory import Message

logger = logging.getLogger(__name__)


class PromptLimit:
    """Measures first prompts, and keeps the rows that are left out.

    Example:
        limit = PromptLimit(config, PromptCache(template))
        limit.admit("train.jsonl:1", limit.length("train.jsonl:1", messages, schemas))
    """

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
