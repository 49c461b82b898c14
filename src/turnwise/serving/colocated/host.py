"""The actor's side of a colocated engine: a process that trains and also hosts a vLLM worker.

The actor runs one call at a time, as Ray's actors do by default: it either trains or generates. If
the engine calls while the actor trains, the call waits, up to its deadline, and the engine answers
no requests until then; so pause the engine (`pause`, or `sleep` on a GPU) before a long training
step. The actor itself must never wait for its own engine.
"""

import os
import pickle
import threading
from typing import TYPE_CHECKING, NamedTuple

from turnwise.errors import EngineError
from turnwise.serving.colocated.process_state import ProcessState, default_group_apart

if TYPE_CHECKING:
    from turnwise.engine import vllm_api as vllm


class _Hosted(NamedTuple):
    """A vLLM worker in this process."""

    engine: str
    """Identifier of the worker's engine."""
    wrapper: "vllm.WorkerWrapperBase"
    state: ProcessState
    thread: int
    """Identifier of the thread that opened the worker, in which all its calls must run."""


class WorkerHost:
    """A mixin for actor classes; `ColocatedExecutor` calls its methods.

    Between two of these calls vLLM has no effect on the process: random numbers, number of
    threads, process groups and torch's defaults are the trainer's. Untested on GPUs, where
    `VllmEngine.sleep` would also free the worker's memory for the trainer.
    """

    _colocated: _Hosted | None = None

    def open_worker(self, engine: str, rank: int, threads: int, environment: dict[str, str]) -> str:
        """Prepare for the worker of `engine`; close one that another engine left behind.

        Returns an address on this machine where the engine's workers can meet.
        """
        if self._colocated is not None:
            self.close_worker(self._colocated.engine)
        os.environ.update(environment)  # before vLLM is imported, which reads it
        state = ProcessState(threads)
        with state.inside():
            from turnwise.engine import vllm_api as vllm

            wrapper = vllm.WorkerWrapperBase(rpc_rank=rank)
            address: str = vllm.get_distributed_init_method(vllm.get_ip(), vllm.get_open_port())
        self._colocated = _Hosted(engine, wrapper, state, threading.get_ident())
        return address

    def call_worker(self, engine: str, call: bytes) -> bytes:
        """Run a pickled `(method, args, kwargs)` on the worker and return the pickled result."""
        worker = self._colocated
        if worker is None or worker.engine != engine:
            raise EngineError("it no longer hosts a worker of this engine")
        if worker.thread != threading.get_ident():
            raise EngineError("an actor that hosts a worker must run its calls in one thread")
        from turnwise.engine import vllm_api as vllm

        with worker.state.inside():
            method, args, kwargs = pickle.loads(call)
            return pickle.dumps(vllm.run_method(worker.wrapper, method, args, kwargs))

    def close_worker(self, engine: str) -> None:
        """Free the worker's memory; without effect if the worker does not exist."""
        worker = self._colocated
        if worker is None or worker.engine != engine:
            return
        self._colocated = None
        from turnwise.engine import vllm_api as vllm

        state, wrapper = worker.state, worker.wrapper
        with state.inside(), default_group_apart():
            if "worker" in vars(wrapper):  # its startup may have failed earlier
                wrapper.shutdown()
            del worker, wrapper
            vllm.cleanup_dist_env_and_memory()
