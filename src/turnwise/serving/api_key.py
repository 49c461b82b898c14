"""The key of the OpenAI server: `serving.api_key`, or TURNWISE_API_KEY."""

import os

from turnwise.config import Config


def api_key(config: Config) -> str | None:
    """Return the key that clients must send; None if there is none.

    Example:
        >>> api_key(config)
        'a-long-key'
    """
    return config.serving.api_key or os.environ.get("TURNWISE_API_KEY")


def with_api_key(config: Config) -> Config:
    """Return the configuration for servers in other processes, on any node.

    On another node the environment of this process, which may set the key, is not known.

    Example:
        >>> with_api_key(config).serving.api_key
        'a-long-key'
    """
    serving = config.serving.model_copy(update={"api_key": api_key(config)})
    return config.model_copy(update={"serving": serving})
