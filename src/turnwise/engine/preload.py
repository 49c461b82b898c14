"""The imports of the process that forks engines, so that an engine starts in half a second.

The heap is frozen after the imports. So a child's garbage collector never touches the pages that
the child shares with its siblings, and never causes a copy of them. A child dies with its parent.
"""

import ctypes
import gc
import importlib
import os
import signal

gc.disable()

from turnwise.core import logs  # noqa: E402
from turnwise.internals.vllm import PRELOAD_MODULES  # noqa: E402

for _name in PRELOAD_MODULES:
    importlib.import_module(_name)

gc.freeze()


def _in_child() -> None:
    """Collect garbage as usual, and die with the parent process."""
    gc.enable()
    logs.register_stacks()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


os.register_at_fork(after_in_child=_in_child)
