"""The stage of a run: its environment class, with the tools and processes of the configuration.

Makes episodes, and previews rows before they are played.
"""

from turnwise.config import Config
from turnwise.core.json_types import JsonObject
from turnwise.rollout.configured_tools import load_tools, with_configured
from turnwise.rollout.environment import (
    EnvironmentType,
    configured_environment,
    name_of,
    type_of,
)
from turnwise.rollout.environment_answers import PREVIEW, PROMPT
from turnwise.rollout.environment_processes import EnvironmentProcesses
from turnwise.rollout.episode import Episode
from turnwise.rollout.problems import Problem
from turnwise.rollout.reading import known_prompt, naming_row, open_environment, own_method
from turnwise.rollout.remote_episode import RemoteEpisode
from turnwise.tools import Tool, ToolFunction
from turnwise.tools.toolbox import make_toolbox
from turnwise.trajectory import Message


class Stage:
    """An environment class, and all that its episodes share.

    Args:
        environment: None means the configured one.
        tools: Whether episodes have the tools of `rollout.tools`.

    Raises:
        InputError: when the environment or a tool cannot be loaded.

    Example:
        stage = Stage(config)
        async with playing(stage.episode(problem), clock, report) as episode:
            print(episode.problem)
    """

    def __init__(
        self, config: Config, environment: EnvironmentType | None = None, *, tools: bool = True
    ) -> None:
        self._rollout = config.rollout
        self._environment = environment or configured_environment(config)
        given = config.environment if environment is None else name_of(environment)
        self.name = f"the environment {given}"
        """The environment in messages."""
        self._tools = load_tools(config.rollout.tools) if tools else []
        self.processes = (
            EnvironmentProcesses(self._environment, config.rollout)
            if config.rollout.environment_process
            else None
        )
        """Processes of environments; None if they run in threads."""

    def episode(self, problem: Problem) -> Episode:
        """Return an episode of a problem, not yet open."""
        if self.processes is not None:
            return RemoteEpisode(self.processes, problem, self._rollout, self._tools)
        return Episode(self._environment, problem, self._rollout, self._tools)

    def preview(self, problem: Problem) -> tuple[list[Message], list[JsonObject]] | None:
        """Return a row's messages and tools; None if they are known after `setup` only.

        Runs user code; call it from a thread.

        Raises:
            InputError: naming the row.
        """
        remote: list[JsonObject] = []
        own: list[ToolFunction | Tool] = []
        if self.processes is not None:
            preview = self.processes.ask("preview", problem, PREVIEW)
            if preview is None:
                return None
            messages = [*map(dict, preview["messages"])]
            remote = [*map(dict, preview["schemas"])]
        else:
            opened = open_environment(self._environment, problem.row, problem.id)
            if opened is None:
                return None
            messages, own = opened.problem, opened.tools
        with naming_row(problem.id, problem.row):
            tools, toolsets = with_configured(own, [], self._tools)
            if toolsets:
                return None
            return messages, [*remote, *make_toolbox(tools, self._rollout).schemas]

    @property
    def knows_prompts(self) -> bool:
        """Whether the environment's class has a `prompt`."""
        return own_method(type_of(self._environment), "prompt") is not None

    def prompt(self, problem: Problem) -> list[Message] | None:
        """Return the messages that the class knows from a row alone; None if it does not.

        Runs user code; call it from a thread.
        """
        if self.processes is not None:
            said = self.processes.ask("prompt", problem, PROMPT)
            return None if said is None else [*map(dict, said)]
        return known_prompt(self._environment, problem.row, problem.id)
