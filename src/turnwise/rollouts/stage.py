"""A stage: an environment with all that its episodes share, and the limits of their first prompts.

No pass over all rows is needed before the first rollout, and no environment is built for a row that
is never played.
"""

import inspect
import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import cast, get_type_hints

import turnwise.tools
from turnwise.chat.prompts import PromptCache
from turnwise.chat.template import in_thread_if_long, missing_stop
from turnwise.config import LOOP_NAMES, Config, ToolConfig
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign, load_object
from turnwise.core.user_code import call_and_wait, call_user_code
from turnwise.errors import InputError, TrajectoryError, describe_error
from turnwise.rollouts.agent_loop import AgentLoop
from turnwise.rollouts.environment import (
    EnvironmentType,
    configured_environment,
    name_of,
    own_method,
    type_of,
)
from turnwise.rollouts.episode import Episode, ToolSource
from turnwise.rollouts.group import TOO_LONG
from turnwise.rollouts.problems import Problem
from turnwise.rollouts.remote_episode import EnvironmentProcesses, RemoteEpisode
from turnwise.tools import Tool, Toolset
from turnwise.tools.foreign import adopted
from turnwise.tools.tool import is_toolset, is_toolset_factory
from turnwise.trajectory import ChatTemplate, Message
from turnwise.trajectory.left_out import check_messages, check_results, check_tools

logger = logging.getLogger(__name__)

_BY_REQUESTS = ("agent", "chat_scheduler")
_READING = ("tool_calling", "self_play")
"""Loops in which the model reads results of tools as messages."""


class Stage:
    """An environment with all that its episodes share: its tools, processes and loop.

    Args:
        config: The configuration as it holds for this environment.
        environment: None means the configured one.
        prompts: Renders the prompts that are measured; None measures none, and offers no tools of
            `rollout.tools`.
        left_out: Reasons why problems are left out, by their ids; all stages of a run share it.
    """

    def __init__(
        self,
        config: Config,
        environment: EnvironmentType | None,
        loop: AgentLoop,
        template: ChatTemplate,
        prompts: PromptCache | None,
        left_out: dict[str, str],
    ) -> None:
        self.rollout = config.rollout
        self.loop = loop
        self._config = config
        self._template = template
        given = config.environment if environment is None else name_of(environment)
        self._name = f"the environment {given}"
        self._environment = environment or configured_environment(config)
        self._tools = [] if prompts is None else load_tools(config.rollout.tools)
        self._processes: EnvironmentProcesses | None = None
        if config.rollout.environment_process:
            self._processes = EnvironmentProcesses(self._environment, config.rollout)
        self.knows_prompts = own_method(type_of(self._environment), "prompt") is not None
        """Whether the environment's class has a `prompt`."""
        self._prompts = prompts
        self._left_out = left_out
        self._longest = config.data.max_prompt_tokens or math.inf
        self._measures = not (template.missing and config.rollout.loop in _BY_REQUESTS)
        """Whether the problems of environments can be rendered as prompts."""
        self._checked = False
        """Whether the first prompt has been checked."""

    def episode(self, problem: Problem) -> Episode:
        if self._processes is not None:
            return RemoteEpisode(self._processes, problem, self.rollout, self._tools)
        return Episode(self._environment, problem, self.rollout, self._tools)

    def check(self, problem: Problem) -> int | None:
        """Build a problem's environment and prompt; call this from a thread.

        Returns:
            Tokens of the prompt; None if they are not known: the environment has a `setup`, which
            is not called, or an agent writes the prompts of a model without a chat template.

        Raises:
            InputError: naming the row with unusable fields or tools, or too long a prompt; or, for
                the first row, what the chat template leaves out of its prompt.
        """

        def measure() -> int | None:
            episode = self.episode(problem)
            if not episode.preview():
                return None
            messages, schemas = episode.problem, episode.toolbox.schemas
            self._check_shown(problem.id, messages, schemas)
            if not self._measures:
                return None
            return self._length(problem.id, messages, self._offered(schemas))

        seconds = self.rollout.environment_timeout
        length = call_and_wait(measure, name=self._name, seconds=seconds)
        if length is not None and length <= self._longest and (reason := self._too_long(length)):
            raise InputError(f"{problem.id}: {reason}")
        return length

    async def known_too_long(self, problem: Problem) -> str:
        """Return why a problem is left out before its environment is built; "" if it is not."""
        if self._prompts is None:
            return ""
        if not (self.knows_prompts and self._measures):
            return self._left_out.get(problem.id, "")

        def measure() -> int | None:
            messages = self.episode(problem).prompt()
            return None if messages is None else self._length(problem.id, messages, [])

        try:
            seconds = self.rollout.environment_timeout
            length = await call_user_code(measure, name=self._name, seconds=seconds)
            if length is not None:
                self._admit(problem.id, length)
        except TrajectoryError as error:
            return str(error)
        except Exception:
            return ""  # its trajectories fail too, and are counted
        return ""

    async def admit(self, problem: Problem, episode: Episode) -> None:
        """Fail a trajectory whose prompt is too long, or which the template refuses."""
        if self._prompts is None or not self._measures:
            return
        messages, schemas = episode.problem, self._offered(episode.toolbox.schemas)
        try:
            length = await in_thread_if_long(
                messages, lambda: self._length(problem.id, messages, schemas)
            )
        except InputError as error:
            if self._template.missing:
                raise
            raise TrajectoryError("template_refuses", str(error)) from error
        self._admit(problem.id, length)

    def _length(
        self, where: str, messages: Sequence[Message], schemas: Sequence[JsonObject]
    ) -> int:
        """Return the number of tokens of a first prompt; an error names the row, `where`."""
        assert self._prompts is not None
        try:
            return len(self._prompts.render(messages, tools=schemas))
        except InputError as error:  # there is no template
            raise InputError(f"{where}: {error}") from error
        except Exception as error:  # a template may raise anything
            refusal = "the chat template refuses the environment's problem"
            raise InputError(f"{where}: {refusal}: {describe_error(error)}") from error

    def _admit(self, where: str, length: int) -> None:
        """Leave out a problem with too long a prompt; the first one is logged as a warning."""
        if reason := self._too_long(length):
            if not self._left_out:
                logger.warning("%s is left out, and so is every such row: %s", where, reason)
            self._left_out[where] = f"{where}: {reason}"
            raise TrajectoryError(TOO_LONG, self._left_out[where])

    def _too_long(self, length: int) -> str:
        """Return why a prompt is too long; "" if it is not."""
        if length > self._longest:
            most = f"{self._longest} (data.max_prompt_tokens)"
            return f"its prompt has {length} tokens, more than {most}"
        if length < (room := self._config.model.max_length):
            return ""
        return (
            f"its prompt of {length} tokens does not fit the context of {room}; raise "
            "model.max_length, or leave such rows out with data.max_prompt_tokens"
        )

    def _offered(self, schemas: Sequence[JsonObject]) -> Sequence[JsonObject]:
        """Return the tools that the chat template gets."""
        rollout = self.rollout
        if not rollout.tools_in_prompt or rollout.call_start or rollout.loop == "single_turn":
            return []
        return schemas

    def _check_shown(
        self, where: str, messages: Sequence[Message], schemas: Sequence[JsonObject]
    ) -> None:
        """Check, once, that the template shows messages and tools, and later the tools' results.

        For a loop of the user's own, `RolloutContext.first_prompt` does.
        """
        loop = self.rollout.loop
        if self._checked or loop in _BY_REQUESTS:
            return
        try:
            check_messages(self._template, messages)
            offered = self._offered(schemas)
            if offered and loop in LOOP_NAMES:
                check_tools(self._template, messages, offered)
            if schemas and loop in _READING:
                check_results(self._template, offered)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        if stop := missing_stop(self._config, self._template):
            logger.warning("%s", stop)
        self._checked = True


def load_tools(entries: Sequence[ToolConfig]) -> list[ToolSource]:
    """Return a source for each entry of `rollout.tools`; each is loaded once, when a run starts."""
    sources: list[ToolSource] = []
    for entry in entries:
        if entry.use is not None:
            sources.append(_used(entry.use))
        elif entry.mcp is not None:
            from turnwise.tools.mcp import McpToolset

            sources.append(partial(McpToolset, entry.mcp))
        else:
            name = "shell" if entry.python is None else "python"
            tool = getattr(turnwise.tools, name)(**getattr(entry, name).model_dump())
            try:
                tool.choose()
            except InputError as error:
                raise InputError(f"rollout.tools.{name}: {error}") from None
            sources.append(cast(ToolSource, tool.toolset))
    return sources


def _used(path: str) -> ToolSource:
    """Return the source of an object that users name."""
    used: Foreign = adopted(load_object(path, "rollout.tools.use"))
    kind = used if isinstance(used, type) else type(used)
    makes, is_set = is_toolset_factory(kind), is_toolset(kind)

    def source() -> Toolset:
        made = used if makes and not isinstance(used, type) else used()
        if not isinstance(made, type) and is_toolset_factory(made):
            made = made.toolset()
        if isinstance(made, type) or not is_toolset(made):
            raise InputError(f"rollout.tools.use: {path} made {made!r:.80}, which is no toolset")
        return made

    if isinstance(used, type):
        if is_set or makes:
            return source
    elif makes:
        return source
    elif isinstance(used, Tool) or is_set:
        return lambda: used
    elif inspect.isroutine(used):
        try:
            returned = get_type_hints(used).get("return")
        except Exception:  # a tool's description reports it
            returned = None
        makes_toolsets = is_toolset(returned) or is_toolset_factory(returned)
        return source if isinstance(returned, type) and makes_toolsets else lambda: used
    raise InputError(
        f"rollout.tools.use: {path} must be a function, a turnwise.Tool, a toolset, or a class or "
        f"function that makes a toolset, not {used!r:.80}"
    )
