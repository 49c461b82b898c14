"""The imports of the process that all lines are forked from; see `runner.preload`."""

import importlib
import os
import traceback
from contextlib import suppress

for name in filter(None, os.environ.get("TURNWISE_GPU_KIT_PRELOAD", "").split(",")):
    try:
        importlib.import_module(name)
    except Exception:  # the line fails when it imports the module itself
        traceback.print_exc()
with suppress(ImportError):  # what a line would otherwise import by itself
    import torch  # noqa: F401
