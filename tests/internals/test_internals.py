"""Internals of other packages: one that is missing, or of other parameters, is named at once."""

import platform
from importlib.metadata import version
from multiprocessing import forkserver

import pydantic_core
import pytest

from turnwise.errors import InputError
from turnwise.internals import internal


def test_an_internal_that_is_as_we_know_it_is_returned() -> None:
    assert internal(forkserver, "main", "listener_fd", "alive_r") is forkserver.main
    assert internal(forkserver.ForkServer(), "_forkserver_address") is None


@pytest.mark.parametrize("wanted", [("serve",), ("main", "alive_r"), ("main", "listener_fd", "x")])
def test_a_missing_internal_is_named_with_its_packages_version(
    wanted: tuple[str, ...],
) -> None:
    name, *parameters = wanted
    said = f"Python {platform.python_version()} has no {name}"
    with pytest.raises(InputError) as refused:
        internal(forkserver, name, *parameters)
    assert str(refused.value).startswith(said)
    assert "in multiprocessing.forkserver" in str(refused.value)
    with pytest.raises(InputError, match=f"pydantic_core {version('pydantic_core')} has no {name}"):
        internal(pydantic_core, name)
