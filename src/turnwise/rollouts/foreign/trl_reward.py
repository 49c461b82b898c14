"""Reward functions with TRL's signature; TRL is not imported.

    def reward(prompts, completions, completion_ids, **kwargs) -> list[float | None]

TRL calls them once for a generation batch; they are called here once for each group, as soon as its
trajectories are finished. They also get the row's other columns as lists, `trainer_state`,
`log_metric`, `log_extra` and, if the environment is TRL's, `environments`.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

from turnwise.errors import InputError
from turnwise.rollouts.environment import finite_number
from turnwise.rollouts.episode import Episode
from turnwise.rollouts.foreign.trl import TrlEnvironment
from turnwise.rollouts.problems import Row
from turnwise.rollouts.run_files import RunFiles
from turnwise.trajectory import Message, Trajectory

_NOT_COLUMNS = ("prompt", "completion", "completion_ids")
_NO_ANSWER: Message = {"role": "assistant", "content": ""}


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The part of TRL's `trainer_state` that a rollout knows."""

    global_step: int
    """Optimizer steps in the newest weights that sampled the completions."""
    max_steps: int
    """Optimizer steps of the whole run."""


class Batch:
    """The arguments of one call, and what the function logs during it.

    Args:
        episodes: The trajectories' episodes, by their position in the group.
        max_steps: Optimizer steps of the run.

    Example:
        batch = Batch(group.trajectories, problem.row, run.episodes, max_steps=100)
        values = reward_function(**batch.arguments)
    """

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        row: Row,
        episodes: Mapping[int, Episode],
        max_steps: int,
    ) -> None:
        self._trajectories = trajectories
        self._metrics: dict[str, list[float]] = defaultdict(list)
        self._bad_metrics = 0
        self._extra: dict[str, list[object]] = {}
        count = len(trajectories)
        played = [episodes[trajectory.sample_index] for trajectory in trajectories]
        conversations = [_conversation(*one) for one in zip(trajectories, played, strict=True)]
        self.arguments: dict[str, object] = {
            "prompts": [prompt for prompt, _ in conversations],
            "completions": [completion for _, completion in conversations],
            "completion_ids": [_completion_ids(trajectory) for trajectory in trajectories],
            **{key: [value] * count for key, value in row.items() if key not in _NOT_COLUMNS},
            "trainer_state": TrainerState(_newest_version(trajectories), max_steps),
            "log_extra": self._log_extra,
            "log_metric": self._log_metric,
        }
        if all(isinstance(episode.environment, TrlEnvironment) for episode in played) and any(
            episode.environment.instance is not None for episode in played
        ):
            self.arguments["environments"] = [episode.environment.instance for episode in played]

    def _log_metric(self, name: str, value: float) -> None:
        number = finite_number(value)
        if number is None:
            self._bad_metrics += 1
        else:
            self._metrics[name].append(number)

    def _log_extra(self, column: str, values: Sequence[object]) -> None:
        if len(values) != len(self._trajectories):
            raise InputError(
                f"log_extra: {column} needs {len(self._trajectories)} values, one for each "
                f"completion, not {len(values)}"
            )
        self._extra[column] = list(values)

    def keep(self, files: RunFiles | None) -> None:
        """Put logged metrics into the trajectories', and append extra columns to `extra.jsonl`.

        A metric that is no finite number is counted as `metrics_error`.

        Args:
            files: Files of the run; None writes none.

        Raises:
            OSError: when the file cannot be written.
        """
        if self._bad_metrics:
            self._trajectories[0].events["metrics_error"] += self._bad_metrics
        for name, values in self._metrics.items():
            for trajectory in self._trajectories:
                trajectory.metrics[name] = sum(values) / len(values)
        if not self._extra or files is None:
            return
        lines = [
            {
                "problem_id": trajectory.problem_id,
                "sample_index": trajectory.sample_index,
                "weight_version": _newest_version([trajectory]),
                **{column: values[index] for column, values in self._extra.items()},
            }
            for index, trajectory in enumerate(self._trajectories)
        ]
        files.append("extra.jsonl", "".join(f"{json.dumps(line, default=str)}\n" for line in lines))


def _conversation(trajectory: Trajectory, episode: Episode) -> tuple[object, object]:
    """Return prompt and completion: texts if the prompt is a text, otherwise messages."""
    environment = episode.environment
    if isinstance(environment, TrlEnvironment) and environment.text is not None:
        return environment.text, trajectory.final_text
    messages = [_as_in_trl(message) for message in trajectory.messages[len(episode.problem) :]]
    return deepcopy(episode.problem), messages or [dict(_NO_ANSWER)]


def _as_in_trl(message: Message) -> Message:
    """Return a copy of a message without the ids of its calls, which TRL does not have."""
    copied = {key: value for key, value in deepcopy(message).items() if key != "tool_call_id"}
    for call in copied.get("tool_calls", ()):
        call.pop("id", None)
    return copied


def _completion_ids(trajectory: Trajectory) -> list[int]:
    """Return all ids after the first prompt, tool results included."""
    if not trajectory.turns:
        return []
    last = len(trajectory.turns) - 1
    ids = [*trajectory.prompt_token_ids(last), *trajectory.turns[last].completion_token_ids]
    return ids[len(trajectory.prompt_token_ids(0)) :]


def _newest_version(trajectories: Sequence[Trajectory]) -> int:
    return max(
        (version for t in trajectories for turn in t.turns for version in turn.weight_versions),
        default=0,
    )


RewardFunction = Callable[..., object]
"""A reward function with TRL's signature, sync or async."""
