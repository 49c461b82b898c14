"""Supervised training's samples: rows of data as trajectories, of which every sampled token is
trained with advantage 1.

A row is a conversation (`messages`, or `prompt` and `completion`), a trajectory of Turnwise, a
training trace of OpenEnv, or token ids with labels. From stored ids nothing is rendered. A row that
cannot be exact is refused, with a reason.
"""

import json
from collections.abc import Callable, Sequence
from itertools import groupby

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

IGNORED = -100
"""Label of a token that is not trained, as in Transformers."""
_FORMS = "messages, prompt and completion, turns (of a trajectory or a trace), or input_ids"
_BROKEN = (KeyError, TypeError, ValueError, AttributeError, IndexError)
"""Errors of a row whose values have other types than its keys promise."""


def supervised_config(config: Config) -> Config:
    """Return the configuration of a supervised run: plain log-probs and `cross_entropy`, or the
    user's own loss; of `algorithm`, only the reduction is kept."""
    own = config.algorithm.loss
    loss = own if isinstance(own, OwnLoss) else CrossEntropy()
    alone = {"colocated": False, "offload": [], "max_staleness": 0}
    return config.model_copy(
        update={
            "algorithm": AlgorithmConfig(loss=loss, reduction=config.algorithm.reduction),
            "sampling": SamplingConfig(),
            "training": config.training.model_copy(update=alone),
            "weights": config.weights.model_copy(update={"transport": "shm"}),
        }
    )


class RowReader:
    """Makes trajectories of rows; safe to use from several threads at once.

    Raises:
        InputError: when the tokenizer has no chat template, and a row needs one.
    """

    def __init__(self, config: Config, template: ChatTemplate) -> None:
        self._template = template
        self._most = config.model.max_length
        self._known = len(template.tokenizer)

    def read(self, problem: Problem) -> Trajectory:
        """Return a row as a trajectory whose sampled tokens are trained.

        Raises:
            TrajectoryError: when the row is refused, with the reason by which it is counted.
        """
        row = problem.row
        try:
            trajectory = self._kind(row)(row, problem.id)
        except InputError as error:
            if self._template.missing:
                raise
            raise TrajectoryError("malformed", str(error)) from error
        except _BROKEN as error:
            raise TrajectoryError("malformed", f"{type(error).__name__}: {error}") from error
        self._check(trajectory)
        return trajectory

    def _kind(self, row: JsonObject) -> Callable[[JsonObject, str], Trajectory]:
        """Return the function that reads rows like this one."""
        if "problem_id" in row and "turns" in row:
            return lambda tree, _: Trajectory.from_tree(tree)
        if "turns" in row:
            return lambda tree, name: from_training_trace(tree, name=name)
        if "input_ids" in row:
            return _of_ids
        if "messages" in row or ("prompt" in row and "completion" in row):
            return self._of_messages
        raise TrajectoryError("unknown_form", f"a row has {_FORMS}; this one: {', '.join(row)}")

    def _of_messages(self, row: JsonObject, name: str) -> Trajectory:
        if self._template.missing:
            raise InputError(self._template.missing)
        messages = row.get("messages")
        if messages is None:
            asked, said = (
                [{"role": role, "content": part}] if isinstance(part, str) else [*part]
                for role, part in (("user", row["prompt"]), ("assistant", row["completion"]))
            )
            messages = [{**message, "weight": 0} for message in asked] + said
        messages = json.loads(messages) if isinstance(messages, str) else messages
        return demonstrate(self._template, messages, tools_of(row), name=name)

    def _check(self, trajectory: Trajectory) -> None:
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


def _of_ids(row: JsonObject, name: str) -> Trajectory:
    """Return the trajectory of token ids, of which those with a label, or a mask of 1, are
    trained."""
    ids = [int(token) for token in row["input_ids"]]
    if "labels" in row:
        labels = list(row["labels"])
        mask = [label != IGNORED for label in labels]
        if any(m and label != i for m, label, i in zip(mask, labels, ids, strict=True)):
            raise TrajectoryError("malformed", f"a label is neither its token's id nor {IGNORED}")
    else:
        mask = list(map(bool, row.get("assistant_masks") or row["completion_mask"]))
    if len(mask) != len(ids):
        raise TrajectoryError("malformed", f"{len(ids)} ids have {len(mask)} labels or bits")
    trajectory, end = Trajectory(name, status="completed"), 0
    for trained, part in groupby(mask):
        start, end = end, end + sum(1 for _ in part)
        if trained:
            count = end - start
            trajectory.add_turn(ids[:start], ids[start:end], [0.0] * count, [0] * count, "stop")
    return trajectory


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
