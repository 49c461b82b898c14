"""An executor for vLLM that forks one process for each shard of an engine.

vLLM imports the executor by its dotted name, in the engine's process. Without a fork server, each
shard's process imports vLLM itself.
"""

import multiprocessing

from turnwise.core import fork_server
from turnwise.internals import vllm


class ForkedExecutor(vllm.MultiprocExecutor):  # type: ignore[misc]
    """One process for each shard, forked if there is a fork server."""

    def _init_executor(self) -> None:
        if fork_server.share_with_engines():
            vllm.use_process_context(multiprocessing.get_context("forkserver"))
        super()._init_executor()
