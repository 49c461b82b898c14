"""Property tests with more examples than `make test` has time for."""

from typing import Any

from hypothesis import given, settings


def run_with(test: Any, examples: int) -> None:
    """Run a property test with this number of examples in place of its own."""
    handle = test.hypothesis
    settings(deadline=None, max_examples=examples)(
        given(**handle._given_kwargs)(handle.inner_test)
    )()
