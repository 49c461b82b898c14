"""Published programs of other systems, run by `tests.published` from clones of their repositories.

PUBLISHED is a folder with the clones verl, NeMo-RL and ChatLearn.
"""

import os
from pathlib import Path

import pytest

from examples.calculator.prepare import prepare
from tests import published

CLONES = Path(os.environ.get("PUBLISHED", "/nowhere"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "run"),
    [("verl", published.verl), ("NeMo-RL", published.nemo), ("ChatLearn", published.chatlearn)],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_published_program_trains(system: str, run: published.Run, tmp_path: Path) -> None:
    if not (clone := CLONES / system).exists():
        pytest.skip(f"PUBLISHED has no clone of {system}")
    prepare(tmp_path)
    prepare()  # the pipeline's files name the model there
    run(clone, tmp_path, steps=2)
