"""Samples with a teacher's log-probs: what trains, what is measured, and what is refused."""

from typing import Any

import pytest
import torch

from tests.training.test_samples import config, group
from turnwise.config import Config
from turnwise.config.supervised import supervised_config
from turnwise.errors import InputError
from turnwise.rollouts import Group
from turnwise.run.checks import check_group_size
from turnwise.training.algorithms import make_algorithm
from turnwise.training.batching import make_micro_batch
from turnwise.training.samples import SampleBatch, make_samples

ALONE = {"advantage": "none", "teacher": {"model": "t"}}


def scored(*rewards: float, by: float = 0.5) -> Group:
    """A group whose sampled tokens the teacher finds likelier by this many nats."""
    made = group(*rewards)
    for trajectory in made.trajectories:
        for branch in trajectory.samples():
            branch.scatter("teacher", [logprob + by for logprob in branch.logprobs])
    return made


def made(groups: list[Group], **algorithm: Any) -> SampleBatch:
    return make_samples(groups, config(algorithm=algorithm), 5)


def test_a_teacher_trains_groups_whose_rewards_are_equal() -> None:
    batch = made([scored(1.0, 1.0)], teacher={"model": "t", "weight": 0.5})
    assert [sample.counted_only for sample in batch.samples] == [False, False]
    assert [sample.teacher_weights for sample in batch.samples] == [(0.5, 0.0)] * 2
    assert batch.groups_without_signal == 0
    assert batch.report.tokens_trained == 12


def test_a_trajectory_alone_trains_without_an_advantage() -> None:
    batch = made([scored(0.0)], advantage="none", teacher={"model": "t"})
    (sample,) = batch.samples
    assert not sample.advantages_T.any()
    assert sample.trained == 6
    at = sample.response_mask_T
    assert (sample.streams["teacher"][at] - sample.logprobs_T[at]).tolist() == pytest.approx(
        [0.5] * 6
    )
    check_group_size(_with(n=1, **ALONE), make_algorithm(_with(n=1, **ALONE).algorithm))


def test_a_group_of_one_needs_an_advantage_without_comparison() -> None:
    beside = _with(n=1, teacher={"model": "t"})
    with pytest.raises(InputError, match=r"sampling.n 1 .* algorithm.advantage to none"):
        check_group_size(beside, make_algorithm(beside.algorithm))


def _with(n: int, **algorithm: Any) -> Config:
    return config(algorithm=algorithm, sampling={"n": n})


def test_ranks_get_the_log_probs_and_weights_of_each_token() -> None:
    samples = made([scored(0.0, 1.0)], teacher={"model": "t", "where": "loss"}).samples
    samples += make_samples([group(0.0, 1.0)], config(), 5).samples  # of none
    lengths = dict.fromkeys((sample.trajectory for sample in samples), 6)
    batch = make_micro_batch(samples, lengths, 5, "padded", torch.device("cpu"))
    assert batch.tokens.teacher_weights_2N is not None
    assert batch.tokens.teacher_weights_2N.tolist() == [[0.0] * 24, [1.0] * 12 + [0.0] * 12]
    assert batch.tokens.teacher_logprobs_N is not None
    differences_N = batch.tokens.teacher_logprobs_N - batch.tokens.engine_logprobs_N
    assert differences_N[:12].tolist() == pytest.approx([0.5] * 12)
    plain = make_micro_batch(samples[2:], lengths, 5, "padded", torch.device("cpu"))
    assert plain.tokens.teacher_logprobs_N is None


def test_a_teacher_in_the_ranks_scores_what_no_other_has() -> None:
    batch = make_samples([group(0.0, 1.0)], config(algorithm=ALONE), 5)
    lengths = dict.fromkeys((sample.trajectory for sample in batch.samples), 6)
    made = make_micro_batch(batch.samples, lengths, 5, "padded", torch.device("cpu"))
    assert made.tokens.teacher_logprobs_N is not None
    assert made.tokens.teacher_logprobs_N.isnan().all()


def test_stale_tokens_learn_nothing_from_a_teacher() -> None:
    batch = make_samples([scored(0.0, 1.0)], config(algorithm=ALONE), 7)
    assert batch.samples == []
    assert batch.stale_tokens == 12


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"algorithm": {"teacher": {}}}, "a model, or the url of a server"),
        (
            {"algorithm": {"teacher": {"model": "t", "api_key_variable": "KEY"}}},
            "api_key_variable applies to a url",
        ),
        ({"algorithm": {"teacher": {"url": "http://h", "engines": 1}}}, "engines to a model"),
        ({"algorithm": {"teacher": {"model": "t", "wieght": 1}}}, "algorithm.teacher.wieght"),
        ({"algorithm": {"advantage": "none"}}, "none leaves nothing to train on"),
        ({"algorithm": {"teacher": {"model": "t"}, "loss": "dpo"}}, "loss dpo"),
        ({"algorithm": ALONE, "sampling": {"top_p": 0.9}}, "sampling.top_p"),
        (
            {"algorithm": {"teacher": {"url": "http://h"}}, "sampling": {"temperature": 0.7}},
            "sampling.temperature to 1",
        ),
        (
            {"algorithm": {"teacher": {"model": "t"}, "kl": {"coef": 0.1}}},
            "one model beside the policy",
        ),
        (
            {"algorithm": {"teacher": {"model": "t"}, "kl": {"sync_steps": 1}}},
            "one model beside the policy",
        ),
    ],
)
def test_what_a_teacher_cannot_do_is_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        config(**sections)


def test_teacher_engines_have_one_more_token_and_no_teacher() -> None:
    made = config(algorithm={"teacher": {"model": "t", "engines": 2}})
    ((key, teacher),) = made.teacher_engines().items()
    own = made.for_teacher(teacher)
    assert (key, own.model.path, own.serving.workers) == ("algorithm.teacher", "t", 2)
    assert own.model.max_length == made.model.max_length + 1
    assert own.teacher_engines() == {}


def test_environments_have_teachers_of_their_own() -> None:
    entry = {"environment": "a:B", "data": {"path": "d"}}
    made = config(
        environment=None,
        data={},
        environments={
            "plain": entry,
            "math": entry | {"teacher": {"url": "http://h/v1", "weight": 2}},
        },
        algorithm={"teacher": {"model": "t"}},
    )
    teachers = made.teachers()
    assert (teachers["plain"].model, teachers["math"].weight) == ("t", 2)
    assert [teacher.in_ranks for teacher in teachers.values()] == [True, False]
    assert made.teacher_key("math") == "environments.math.teacher"
    assert made.other_models() == {made.teacher_key("plain"): "t"}
    assert supervised_config(made).teachers() == {}
    only = made.model_copy(update={"algorithm": config().algorithm})
    assert only.teachers().keys() == {"math"}
