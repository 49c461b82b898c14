"""Python's own internals: multiprocessing's fork server, exit functions, C signal handlers, first
imports."""

import atexit
import ctypes
import gc
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from types import ModuleType

from turnwise.internals import internal

run_exit_functions: Callable[[], None] = internal(atexit, "_run_exitfuncs")
"""Runs the functions registered with `atexit`, without the other steps of Python's shutdown."""
_server = internal(forkserver, "_forkserver")
_bootstrap = internal(importlib, "_bootstrap")
_find_and_load = internal(_bootstrap, "_find_and_load", "name", "import_")
_get_handler = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int)(("PyOS_getsig", ctypes.pythonapi))
_set_handler = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(
    ("PyOS_setsig", ctypes.pythonapi)
)


def knows_fork_server() -> bool:
    """Return whether multiprocessing's fork server has forked this process; if so, make this
    process use that server.

    Otherwise this process would start a second server, which has not imported any modules.
    """
    if _server._forkserver_address is None:
        return False
    _server.ensure_running = lambda: None
    return True


def use_fork_server(address: str, alive: int) -> None:
    """Let multiprocessing fork from a running server; the server ends when the pipe `alive` is
    closed."""
    _server._forkserver_address, _server._forkserver_alive_fd = address, alive
    _server.ensure_running = lambda: None


def serve_forks(listener: int, alive: int) -> None:
    """Make this process a multiprocessing fork server that has already imported its modules."""
    # At its end, an engine unfreezes the heap and collects garbage, which would copy shared memory.
    setattr(gc, "unfreeze", lambda: None)  # noqa: B010
    forkserver.main(listener, alive, [])


def surround_first_imports(begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Call `begin` before and `end` after each import of a module that is not loaded yet."""

    def find(name: str, import_: Callable[..., ModuleType]) -> ModuleType:
        begin()
        try:
            module: ModuleType = _find_and_load(name, import_)
            return module
        finally:
            end()

    # If the code has importlib's file name, tracebacks omit it, and warnings name the importer.
    find.__code__ = find.__code__.replace(co_filename=_find_and_load.__code__.co_filename)
    _bootstrap._find_and_load = find


@contextmanager
def signal_handler_kept(number: int) -> Iterator[None]:
    """Restore the C handler of a signal after a `with` block, in any thread. Ray replaces the
    handler of SIGTERM by a function that prints C++ frames and aborts."""
    handler = _get_handler(number)
    try:
        yield
    finally:
        _set_handler(number, handler)


for _name in ("_forkserver_address", "_forkserver_alive_fd", "ensure_running"):
    internal(_server, _name)
internal(forkserver, "main", "listener_fd", "alive_r", "preload")
