"""Configurations of the runs that compare corrections and algorithms: each is one that we have."""

import pytest

from benchmarks.learning import CONFIG, CORRECTIONS
from examples.calculator.algorithms import ALGORITHMS, COMMON
from turnwise.config import load_config


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_that_is_compared_is_a_configuration(name: str) -> None:
    algorithm = load_config(CONFIG, ["training.max_staleness=4", *CORRECTIONS[name]]).algorithm
    assert name.startswith((algorithm.correction.name, algorithm.loss.name))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_of_the_example_is_a_configuration(name: str) -> None:
    load_config(CONFIG, [*COMMON, *ALGORITHMS[name]])
