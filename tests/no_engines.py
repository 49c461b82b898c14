"""A pytest plug-in: the tier of tests that need neither vLLM nor Ray. Importing them is an error.

    pytest -p tests.no_engines               # the tier; `make quick` runs it
    pytest -p tests.no_engines PATH ...      # everything under these paths, in the tier or not

The tier is a rule of folders and files: a test belongs to it when its path is in `TIER`.
"""

import sys
from pathlib import Path

import pytest

sys.modules["vllm"] = sys.modules["ray"] = None  # type: ignore[assignment]

TESTS = Path(__file__).parent
TIER = (
    "benchmarks",
    "chat/test_session.py",
    "core/test_children.py",
    "core/test_foreign_lines.py",
    "core/test_forking.py",
    "core/test_gguf.py",
    "core/test_interrupt.py",
    "core/test_stacks.py",
    "core/test_untrusted.py",
    "core/test_user_code.py",
    "core/test_watchdog.py",
    "engine/test_adapter_files.py",
    "rollouts/foreign/test_agent_task.py",
    "rollouts/foreign/test_nemo_gym.py",
    "rollouts/test_agent_processes.py",
    "rollouts/test_curriculum.py",
    "rollouts/test_data.py",
    "rollouts/test_environment_answers.py",
    "rollouts/test_environment_rows.py",
    "rollouts/test_evaluation.py",
    "rollouts/test_producer.py",
    "rollouts/test_run_files.py",
    "tools/test_python_and_shell.py",
    "tools/test_sandbox_attacks.py",
    "tools/test_mcp.py",
    "tools/test_mcp_http.py",
    "tools/test_foreign_tools.py",
    "tools/test_schema.py",
    "tools/test_toolbox.py",
    "core/test_files.py",
    "observe/test_alarms.py",
    "run/test_checkpoints.py",
    "observe/test_conversations.py",
    "run/test_display.py",
    "run/test_export.py",
    "run/test_full_disk.py",
    "run/test_project.py",
    "core/test_stuck.py",
    "run/test_token_values.py",
    "observe/test_trackers.py",
    "serving/openai/test_deduplicate.py",
    "serving/openai/test_web_pages.py",
    "serving/test_manager.py",
    "serving/test_scheduler.py",
    "serving/test_updates_and_restarts.py",
    "test_config.py",
    "training/algorithms",
    "training/test_attention.py",
    "training/test_batching.py",
    "training/test_gather.py",
    "training/test_layers.py",
    "training/test_layout_check.py",
    "training/test_lora.py",
    "training/test_masked_tokens.py",
    "training/test_rank.py",
    "training/test_resume.py",
    "training/test_samples.py",
    "trajectory",
    "trl/test_mapping.py",
    "viewer/test_demo.py",
    "viewer/test_elsewhere.py",
    "viewer/test_template_diff.py",
    "viewer/test_viewer.py",
)
"""Folders and files of the tier, below tests/."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out tests outside the tier, unless paths below tests/ are named."""
    if {Path(name.partition("::")[0]).resolve() for name in config.args} != {TESTS}:
        return None
    places = [TESTS / name for name in TIER]
    if any(collection_path.is_relative_to(p) or p.is_relative_to(collection_path) for p in places):
        return None
    return True
