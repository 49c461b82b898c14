"""The server's key, as other processes get it."""

from collections.abc import Callable

import pytest

from turnwise.config import Config
from turnwise.serving.openai.address import api_key, with_api_key


def test_servers_on_other_nodes_get_the_key_of_the_environment(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    monkeypatch.delenv("TURNWISE_API_KEY", raising=False)
    assert with_api_key(config).serving.api_key is None
    monkeypatch.setenv("TURNWISE_API_KEY", "")
    assert with_api_key(config).serving.api_key is None
    monkeypatch.setenv("TURNWISE_API_KEY", "a-long-key")
    sent = with_api_key(config)
    monkeypatch.delenv("TURNWISE_API_KEY")
    assert api_key(sent.serving) == "a-long-key"
    assert api_key(config.serving) is None
    assert api_key(with_api_key(make_config(serving={"api_key": "another"})).serving) == "another"
