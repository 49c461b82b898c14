"""A pytest plug-in for tests that need neither vLLM nor Ray: importing them is an error."""

import sys

sys.modules["vllm"] = sys.modules["ray"] = None  # type: ignore[assignment]
