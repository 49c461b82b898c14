"""The prompt of the first row, as the chat template shows it to the model."""

import logging
from collections.abc import Sequence

from turnwise.chat.template import missing_stop
from turnwise.config import LOOP_NAMES, Config
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError
from turnwise.trajectory import ChatTemplate, Message
from turnwise.trajectory.left_out import check_messages, check_results, check_tools

logger = logging.getLogger(__name__)

_BY_REQUESTS = ("agent", "chat_scheduler")
"""Loops whose prompts come from requests."""
_READING = ("tool_calling", "self_play")
"""Loops in which the model reads results of tools as messages."""


class ShownPrompt:
    """Checks the first row's prompt for what the model would not see, once.

    Example:
        shown = ShownPrompt(config, template)
        shown.check("train.jsonl:1", messages, schemas)
    """

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
