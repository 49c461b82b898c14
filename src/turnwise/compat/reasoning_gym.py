"""Problems of reasoning-gym's procedural datasets, which also score the answers."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import ClassVar

from turnwise.compat.package import HELD_OUT, adapter
from turnwise.core.optional import Foreign, required
from turnwise.errors import InputError, describe_error
from turnwise.rollouts.environment import Environment
from turnwise.rollouts.problems import Row
from turnwise.trajectory import Trajectory

_package = partial(required, "reasoning_gym", "reasoning-gym", "environment: reasoning_gym")

_EVERY = "*"
"""Key for all attributes of a curriculum, as in reasoning-gym's own configurations."""


class ReasoningGym(Environment):
    """A problem of a dataset of reasoning-gym: one turn, unless a subclass or the run provides
    tools.

    The reward is the dataset's `score_answer` for the text between `<answer>` and `</answer>` in
    the last answer, or for the whole answer if it has no such tags.

    Args:
        row: An entry of the dataset, with `question` and `answer`.
        dataset: Name of the dataset; "" uses the class attribute.
        curriculum: Levels of the dataset's curriculum, by attribute, or one level for all
            attributes.
        system_prompt: Name of one of reasoning-gym's prompts (`default`, `simple`, `direct` ...),
            or a text; None for no system message.
        config: Further keys of the dataset's configuration, such as `size` and `seed`.

    Example:
        class Sums(ReasoningGym):
            dataset = "chain_sum"

            def __init__(self, row, **config):
                super().__init__(row, **config)
                self.tools = [add]
    """

    dataset: ClassVar[str] = ""

    def __init__(
        self,
        row: Row,
        dataset: str = "",
        *,
        curriculum: int | Mapping[str, int] | None = None,
        system_prompt: str | None = "default",
        **config: object,
    ) -> None:
        self.entry = row
        """The entry of the dataset."""
        self._data = _dataset(dataset or self.dataset, _keys(curriculum, config))
        self.problem = [{"role": "user", "content": row["question"]}]
        if system_prompt is not None:
            own: Mapping[str, str] = _package().utils.SYSTEM_PROMPTS
            text = own.get(system_prompt, system_prompt)
            self.problem.insert(0, {"role": "system", "content": text})

    @classmethod
    def rows(
        cls,
        split: str,
        dataset: str = "",
        *,
        curriculum: int | Mapping[str, int] | None = None,
        system_prompt: str | None = "default",
        **config: object,
    ) -> Sequence[Row]:
        """Return the dataset's entries. Held-out entries are made with a different seed than the
        training entries; each of their questions occurs only once, and in no training entry."""
        name, keys = dataset or cls.dataset, _keys(curriculum, config)
        trained = list(_dataset(name, keys))
        if split != "eval":
            return trained
        seen = {entry["question"] for entry in trained}
        rows = list[Row]()
        for entry in _dataset(name, keys, HELD_OUT):
            if entry["question"] not in seen:
                seen.add(entry["question"])
                rows.append(entry)
        if not rows:
            raise InputError(
                f"reasoning_gym:{name}: every held-out question is one of training: lower "
                "environment_args.size, or let the dataset's other keys make more questions"
            )
        return rows

    def reward(self, trajectory: Trajectory) -> float:
        return self.score(trajectory.final_text)

    def score(self, text: str) -> float:
        """Return the dataset's score of a text with an answer, from 0 to 1."""
        answer = _package().utils.extract_answer(text)
        answer = text.strip() if answer is None else answer
        return float(self._data.score_answer(answer, self.entry))


at = adapter("reasoning_gym", ReasoningGym, "dataset", lambda: _package().factory.DATASETS)


def _keys(curriculum: int | Mapping[str, int] | None, config: Mapping[str, object]) -> str:
    return json.dumps([curriculum, config], sort_keys=True)


@lru_cache(maxsize=64)
def _dataset(name: str, keys: str, seed_offset: int = 0) -> Foreign:
    """Make a dataset; all environments with the same keys (see `_keys`) share it."""
    levels, config = json.loads(keys)
    levels = {_EVERY: levels} if isinstance(levels, int) else levels or {}
    factory = _package().factory
    config["seed"] = config.get("seed", 0) + seed_offset
    try:
        if not levels:
            return factory.create_dataset(name, **config)
        made = factory.create_curriculum(name)
        if (level := levels.pop(_EVERY, None)) is not None:
            made.set_global_level(level)
        for attribute, level in levels.items():
            made.set_attr_level(attribute, level)
        kind, _ = factory.DATASETS[name]
        return kind(config=made.generate_configuration(config))
    except Exception as error:  # an unknown key or level, or a wrong value
        raise InputError(
            f"environment_args: reasoning_gym:{name} cannot be made: {describe_error(error)}"
        ) from error
