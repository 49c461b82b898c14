"""Fixtures of pipelines; what needs engines is imported by those that use it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from turnwise.config import Config, dump_config

if TYPE_CHECKING:
    from tests.pipeline.bench import Join


@pytest.fixture
def join(make_config: Callable[..., Config], build: Path, tokenizer: Any) -> "Iterator[Join]":
    """Joins a module to a bench, with the tokenizer `words`; other arguments replace sections of
    its configuration."""
    from tests.pipeline.bench import CONTEXT, NEW, Bench

    benches: list[Bench] = []

    def join(module: Any, words: Any = tokenizer, **sections: Any) -> Any:
        sections = {
            "model": {"path": str(build / "model"), "max_length": CONTEXT},
            "sampling": {"n": 2, "max_tokens": NEW},
            "eval": {"sampling": {"n": 1, "temperature": 0, "max_tokens": 5}},
        } | sections
        benches.append(Bench(make_config(**sections), words))
        module.start(benches[-1])
        return module

    yield join
    for bench in benches:
        bench.close()


@pytest.fixture
def pipeline_file(make_config: Callable[..., Config], tmp_path: Path) -> Path:
    path = tmp_path / "pipeline.yaml"
    path.write_text(dump_config(make_config()))
    return path
