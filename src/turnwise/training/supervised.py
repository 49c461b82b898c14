"""Supervised training's samples: rows of data as trajectories, of which every sampled token is
trained with advantage 1.

A row is a conversation (`messages`, or `prompt` and `completion`), a trajectory of Turnwise, or a
training trace of OpenEnv. From stored ids nothing is rendered. A row that cannot be exact is
refused, with a reason.
"""

import json
from collections.abc import Sequence

from turnwise.chat.demonstrations import demonstrate, tools_of
from turnwise.config import AlgorithmConfig, Config, OwnLoss, SamplingConfig
from turnwise.config.algorithm import CrossEntropy
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollouts import Problem
from turnwise.training.sample import Sample
from turnwise.training.samples import SampleBatch
from turnwise.trajectory import ChatTemplate, Trajectory, audit
from turnwise.trajectory.training_trace import from_training_trace

_FORMS = "messages, prompt and completion, or turns (of a trajectory or a trace)"


def supervised_config(config: Config) -> Config:
    """Return the configuration of a supervised run: plain log-probs and `cross_entropy`, or the
    user's own loss; of `algorithm`, only the reduction is kept."""
    own = config.algorithm.loss
    loss = own if isinstance(own, OwnLoss) else CrossEntropy()
    alone = {"colocated": False, "offload": [], "max_staleness": 0}
    return config.model_copy(
        update={
            "environments": {
                name: entry.model_copy(update={"teacher": None})
                for name, entry in config.environments.items()
            },
            "algorithm": AlgorithmConfig(loss=loss, reduction=config.algorithm.reduction),
            "sampling": SamplingConfig(),
            "training": config.training.model_copy(update=alone),
            "weights": config.weights.model_copy(update={"transport": "shm"}),
        }
    )


class RowReader:
    """Makes trajectories of rows; safe to use from several threads at once."""

    def __init__(self, config: Config, template: ChatTemplate) -> None:
        self._template = template
        self._most = config.model.max_length
        self._known = len(template.tokenizer)

    def read(self, problem: Problem) -> Trajectory:
        """Return a row as a trajectory whose sampled tokens are trained.

        Raises:
            TrajectoryError: when the row is refused, with the reason by which it is counted.
            InputError: when it is a conversation, and the tokenizer has no chat template.
        """
        row, name, stored = problem.row, problem.id, "turns" in problem.row
        if self._template.missing and not stored:
            raise InputError(self._template.missing)
        try:
            if not stored:
                return self._checked(
                    demonstrate(self._template, _messages_of(row), tools_of(row), name=name)
                )
            if "problem_id" in row:
                return self._checked(Trajectory.from_tree(row))
            return self._checked(from_training_trace(row, name=name))
        except (InputError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            # Its values have other types than its keys promise.
            why = str(error) if isinstance(error, InputError) else repr(error)
            raise TrajectoryError("malformed", why) from error

    def _checked(self, trajectory: Trajectory) -> Trajectory:
        report = audit(trajectory)
        if report.first_violation is not None:
            raise TrajectoryError("not_exact", report.first_violation)
        if not report.tokens_trained:
            raise TrajectoryError("nothing_to_train", "no token of it was sampled")
        longest = max(turn.path_length for turn in trajectory.turns)
        if longest > self._most:
            raise TrajectoryError(
                "too_long", f"{longest:,} tokens are more than model.max_length {self._most:,}"
            )
        ids = (i for t in trajectory.turns for i in (*t.added_token_ids, *t.completion_token_ids))
        if (largest := max(ids)) >= self._known:
            raise TrajectoryError(
                "unknown_token", f"token {largest} is none of this tokenizer's {self._known:,}"
            )
        return trajectory


def _messages_of(row: JsonObject) -> list[JsonObject]:
    """Return the messages of a row, of which those of a prompt are context."""
    if "messages" in row:
        messages = row["messages"]
        return list(json.loads(messages) if isinstance(messages, str) else messages)
    if "prompt" not in row or "completion" not in row:
        raise TrajectoryError("unknown_form", f"a row has {_FORMS}; this one: {', '.join(row)}")
    asked, said = (
        [{"role": role, "content": part}] if isinstance(part, str) else [*part]
        for role, part in (("user", row["prompt"]), ("assistant", row["completion"]))
    )
    return [{**message, "weight": 0} for message in asked] + said


def supervised_samples(trajectories: Sequence[Trajectory], version: int) -> SampleBatch:
    """Return the samples of a step, one for each branch, whose trained tokens all have advantage 1,
    with an audit of each token.

    Args:
        version: The trainer's, which the samples have, whatever sampled their tokens.
    """
    batch = SampleBatch()
    for trajectory in trajectories:
        branches = trajectory.samples()
        batch.report += audit(trajectory, branches)
        first = len(batch.samples)
        for branch in branches:
            sample = Sample.of(
                branch.token_ids,
                branch.response_mask,
                branch.logprobs,
                [version if trained else -1 for trained in branch.response_mask],
                1.0,
                sequence=len(batch.samples),
                trajectory=first,
                turns=branch.turns,
                experts=branch.experts,
            )
            if sample.trained:  # nothing precedes the first token of a sequence
                batch.samples.append(sample)
                batch.origins[id(sample)] = trajectory
    return batch
