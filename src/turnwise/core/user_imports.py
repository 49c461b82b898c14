"""First imports by user code: one thread at a time makes them.

Modules of a package may import one another. Two threads that enter such a package by different
modules would each wait for a module that the other imports; Python then gives one of them a module
of which only a part has run. So user code begins a first import only when no other thread is in the
middle of one. Nothing waits for an import that takes longer than `MAX_SECONDS`.
"""

import os
import threading
import time

from turnwise.internals.python import surround_first_imports

MAX_SECONDS = 30.0
"""Time after which nothing waits for an import any more: it may hang, or wait for a waiting thread.
"""


class _Thread(threading.local):
    runs_user_code = False
    """Whether the thread waits for imports of other threads; our own event loops never wait."""
    depth = 0
    """Number of first imports that the thread is in the middle of, each within the one before."""
    holds = False


thread = _Thread()
"""State of the current thread."""


class _Turn:
    """The turn to import, which a thread keeps until its outermost first import has ended."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)  # the holder may be a thread of the parent's

    def renew(self) -> None:
        self._since: float | None = None
        """Time at which a thread took the turn; None if no thread has it."""
        self._changed = threading.Condition()

    def begin(self) -> None:
        thread.depth += 1
        if thread.depth > 1:
            return
        with self._changed:
            if thread.runs_user_code:
                while self._since is not None:
                    left = self._since + MAX_SECONDS - time.monotonic()
                    if left <= 0:
                        break
                    self._changed.wait(left)
            if self._since is None:
                self._since, thread.holds = time.monotonic(), True

    def end(self) -> None:
        thread.depth -= 1
        if thread.depth == 0 and thread.holds:
            thread.holds = False
            with self._changed:
                self._since = None
                self._changed.notify_all()


_turn = _Turn()
surround_first_imports(_turn.begin, _turn.end)
