"""Tinker's own client, with a server in the same process."""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from turnwise.core.loop_thread import EventLoopThread
from turnwise.core.optional import Foreign, required

logger = logging.getLogger(__name__)

_START_SECONDS = 300.0  # in addition to the engines' own deadline
_CLOSE_SECONDS = 60.0


class ServiceClient:
    """The SDK's `ServiceClient`, with all its methods, and a server in the same process. Engines
    and a trainer start with the client, and stop with `close`. This needs the package `tinker`.

    Args:
        model: Folder or Hugging Face name of the model; default: the model of `config`.
        config: Path of a YAML configuration.
        overrides: Values that replace configuration keys, each `key.sub=value`.
        stable_reinforce: Name of the loss to compute for stable_reinforce; "" refuses
            stable_reinforce.
        project: Arguments of the SDK's `ServiceClient`.

    Raises:
        InputError: when an argument cannot be used, or `tinker` is not installed.

    Example:
        with turnwise.tinker.ServiceClient("Qwen/Qwen3-0.6B") as service:
            training = service.create_lora_training_client("Qwen/Qwen3-0.6B", rank=8).result()
    """

    def __init__(
        self,
        model: str | None = None,
        config: str | Path | None = None,
        overrides: Sequence[str] = (),
        stable_reinforce: str = "",
        **project: Foreign,
    ) -> None:
        from turnwise.tinker.backend import KEY_PREFIX, open_tinker, server_config  # seconds

        sdk = required("tinker", "tinker", "turnwise.tinker.ServiceClient")
        file = None if config is None else Path(config)
        resolved = server_config(model, file, ["serving.port=0", *overrides])
        opened = partial(open_tinker, resolved, stable=stable_reinforce)
        self._thread = EventLoopThread(opened, "the Tinker server")
        self.api_key = resolved.serving.key or f"{KEY_PREFIX}local"
        try:
            self.base_url = self._thread.start(resolved.engine.start_timeout + _START_SECONDS)
            self._client = sdk.ServiceClient(
                base_url=self.base_url, api_key=self.api_key, **project
            )
        except BaseException as error:
            self._thread.leave(_CLOSE_SECONDS, error)
            raise

    def __getattr__(self, name: str) -> Foreign:
        return getattr(object.__getattribute__(self, "_client"), name)

    def __enter__(self) -> "ServiceClient":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close("success" if error is None else "errored", error)

    def close(
        self,
        status: Literal["success", "errored", "interrupted"] = "success",
        error: BaseException | None = None,
    ) -> None:
        """End the session, then the server; `error` is the exception that ended the program."""
        try:
            self._client.close(status).result(_CLOSE_SECONDS)
        except Exception as failure:  # the server ends the session too
            logger.warning("the session was not closed: %s", failure)
        finally:
            self._thread.leave(_CLOSE_SECONDS, error)
