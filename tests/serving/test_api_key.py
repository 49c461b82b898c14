"""The server's key, as other processes get it."""

from collections.abc import Callable

import pytest

from turnwise.config import Config


def test_servers_on_other_nodes_get_the_key_of_the_environment(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    monkeypatch.delenv("TURNWISE_API_KEY", raising=False)
    assert config.with_api_key().serving.api_key is None
    monkeypatch.setenv("TURNWISE_API_KEY", "")
    assert config.with_api_key().serving.api_key is None
    monkeypatch.setenv("TURNWISE_API_KEY", "a-long-key")
    sent = config.with_api_key()
    monkeypatch.delenv("TURNWISE_API_KEY")
    assert sent.serving.key == "a-long-key"
    assert config.serving.key is None
    assert make_config(serving={"api_key": "another"}).with_api_key().serving.key == "another"
