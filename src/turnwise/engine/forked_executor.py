"""vLLM's executor of one process for each shard of an engine, which are forked as the engine is.

vLLM imports it by its dotted name, in the engine's process. Started plainly, each shard would
import vLLM by itself.
"""

import multiprocessing

from turnwise import fork_server
from turnwise.engine import vllm_names as vllm


class ForkedExecutor(vllm.MultiprocExecutor):  # type: ignore[misc]
    """One process for each shard; where there is no fork server, started as vLLM does."""

    def _init_executor(self) -> None:
        if fork_server.share_with_engines():
            vllm.use_process_context(multiprocessing.get_context("forkserver"))
        super()._init_executor()
