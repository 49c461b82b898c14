"""Environments in the form of verifiers' first versions: rows, reward functions, and `generate`.

This module reads the environment's rows and rewards. The key `rollout.sampler` names the same
object, whose method `generate(prompts, llm, sampling_params)` then samples the answers. verifiers
is not imported, so objects of TRL's proposed environment class also fit. Later versions of
verifiers use an OpenAI client, so run their environments as agents.
"""

from collections.abc import Callable, Iterable, Sequence

from turnwise.chat.images import with_urls
from turnwise.core.optional import Foreign, load_object
from turnwise.errors import InputError
from turnwise.rollouts.environment import Environment, Rewards, read_messages, read_reward
from turnwise.rollouts.problems import Row
from turnwise.trajectory import Trajectory

_NOT_COLUMNS = ("prompt", "prompts", "completions")


class VerifiersEnvironments:
    """An environment type made from an object, `package.module:name`, or from a class without
    arguments.

    Rows have a `prompt`. The reward functions come from `get_rubric()` or `get_reward_funcs()`, and
    their weights from `get_reward_weights()`.
    """

    def __init__(self, address: str) -> None:
        found: Foreign = load_object(address, "environment")
        self._environment = found() if isinstance(found, type) else found
        self._address = address
        functions = self._called("get_rubric") or self._called("get_reward_funcs")
        self.functions: list[Callable[..., Foreign]] = list(functions or ())
        weights = list(self._called("get_reward_weights") or [1.0] * len(self.functions))
        if len(weights) != len(self.functions) or not all(map(callable, self.functions)):
            raise InputError(
                f"environment: {address} must give functions, and a weight for each: it has "
                f"{len(self.functions)} and {len(weights)} weights"
            )
        self.weights = [float(weight) for weight in weights]

    def __call__(self, row: Row) -> "VerifiersEnvironment":
        return VerifiersEnvironment(row, self)

    def rows(self, split: str) -> Sequence[Row]:
        """Return the rows of `get_dataset()`, or of `get_eval_dataset()` for the split `eval`."""
        name = "get_eval_dataset" if split == "eval" else "get_dataset"
        rows: Iterable[Row] | None = self._called(name)
        if rows is None:
            raise InputError(f"data.path: {self._address} has no rows in {name}()")
        return [dict(row) for row in rows]

    def _called(self, name: str) -> Foreign:
        """Call a method without arguments, and return its result; None if there is no such
        method."""
        method = getattr(self._environment, name, None)
        return method() if callable(method) else None


class VerifiersEnvironment(Environment):
    """The environment of one trajectory: a row's prompt, and its rewards."""

    def __init__(self, row: Row, environments: VerifiersEnvironments) -> None:
        self._row = row
        self._environments = environments
        self.problem = row["prompt"]

    def reward(self, trajectory: Trajectory) -> Rewards:
        """Call each reward function with a batch of one, and return the weighted values.

        The arguments are lists: `prompts`, `completions` and the row's other fields. A completion
        is the list of messages after the prompt, with images as data: URLs.
        """
        environments = self._environments
        if not environments.functions:
            raise InputError("the environment gives no reward functions: list rollout.rewards")
        asked = read_messages(self.problem, "prompt")
        columns = {name: [value] for name, value in self._row.items() if name not in _NOT_COLUMNS}
        completion = with_urls(trajectory.messages[len(asked) :])
        parts: dict[str, float] = {}
        weighed = zip(environments.functions, environments.weights, strict=True)
        for number, (function, weight) in enumerate(weighed):
            name = str(getattr(function, "__name__", f"reward_{number}"))
            (value,) = function(prompts=[self.problem], completions=[completion], **columns)
            parts[name] = parts.get(name, 0.0) + weight * read_reward(value, name)
        return Rewards(parts=parts)
