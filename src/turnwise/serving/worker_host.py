"""What an actor that trains needs so that a vLLM worker can live in it.

The actor runs one call at a time, as Ray's actors do unless told otherwise: it trains or it
generates. A call of the engine that comes while it trains waits, up to its deadline, and the
engine answers nobody meanwhile; so pause the engine (`pause`, or `sleep` on a GPU) before a long
training step. The actor itself must never wait for its own engine.
"""

import os
import pickle
import threading
from dataclasses import dataclass
from typing import Any

from turnwise.errors import EngineError
from turnwise.serving.process_state import Guest, default_group_apart


@dataclass(frozen=True, slots=True)
class _Lodger:
    engine: str
    wrapper: Any
    guest: Guest
    thread: int


class WorkerHost:
    """A mixin for actor classes, whose methods `ColocatedExecutor` calls.

    Between two of these calls the process is as if there were no vLLM in it: random numbers,
    number of threads, process groups and torch's defaults are the trainer's. Never run on a GPU,
    where `VllmEngine.sleep` would also lend the worker's memory to the trainer.
    """

    _lodger: _Lodger | None = None

    def open_worker(self, engine: str, rank: int, threads: int, environment: dict[str, str]) -> str:
        """Make room for the worker of `engine`; one that another engine left is closed.

        Returns:
            An address on this machine where the engine's workers can meet.
        """
        if self._lodger is not None:
            self.close_worker(self._lodger.engine)
        os.environ.update(environment)  # before vLLM is imported, which reads it
        guest = Guest(threads)
        with guest.inside():
            from turnwise.engine import vllm_names as vllm

            wrapper = vllm.WorkerWrapperBase(rpc_rank=rank)
            address: str = vllm.get_distributed_init_method(vllm.get_ip(), vllm.get_open_port())
        self._lodger = _Lodger(engine, wrapper, guest, threading.get_ident())
        return address

    def call_worker(self, engine: str, call: bytes) -> bytes:
        """Run a pickled `(method, args, kwargs)` on the worker; returns the pickled result.

        Raises:
            EngineError: when the worker of `engine` is not here (any more), or the actor runs
                its calls in several threads.
        """
        lodger = self._lodger
        if lodger is None or lodger.engine != engine:
            raise EngineError("it no longer hosts a worker of this engine")
        if lodger.thread != threading.get_ident():
            raise EngineError("an actor that hosts a worker must run its calls in one thread")
        from turnwise.engine import vllm_names as vllm

        with lodger.guest.inside():
            method, args, kwargs = pickle.loads(call)
            return pickle.dumps(vllm.run_method(lodger.wrapper, method, args, kwargs))

    def close_worker(self, engine: str) -> None:
        """Give the worker's memory back; does nothing when it is not here."""
        lodger = self._lodger
        if lodger is None or lodger.engine != engine:
            return
        self._lodger = None
        from turnwise.engine import vllm_names as vllm

        guest, wrapper = lodger.guest, lodger.wrapper
        with guest.inside(), default_group_apart():
            if "worker" in vars(wrapper):  # it may never have got that far
                wrapper.shutdown()
            del lodger, wrapper
            vllm.cleanup_dist_env_and_memory()
