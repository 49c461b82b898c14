"""TRL's own tests of its GRPO trainer, with another import, and with models and rows of this disk.

    TRL_TESTS=trl/tests python -m pytest -m slow tests/trl/test_trls_own_tests.py

`TRL_TESTS` is the folder `tests` of a checkout of TRL, whose package the tests import. All its
tests of texts pass, but those that docs/how-to/trl.md lists with the reason. It takes half an
hour.
"""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, command_environment
from tests.trl.stand_ins import HUB, make_models, make_rows

FOLDER = os.environ.get("TRL_TESTS")
PAGE = ROOT / "docs" / "how-to" / "trl.md"
LEFT_OUT = ("TestGRPOTrainerVLM", "TestGRPOTrainerSlow")
"""Classes of tests of images, and of those that need a GPU or the Hub."""
_IMPORT = "from trl import GRPOConfig, GRPOTrainer\n"
_OURS = {
    "engine.kv_cache_gib": 0.0625,
    "model.max_length": 512,
    "weights.canary_tolerance": 1.0,
}
"""Keys that TRL has not: of a small engine, and of log-probs of minus hundreds, which the tests'
learning rate of 0.1 leads to, and whose last digits differ."""


def not_passing() -> dict[str, str]:
    """Return the tests of TRL that do not pass, with the reasons that the documentation gives."""
    table = re.findall(r"^\| (`test_.*`) \| (.+) \|$", PAGE.read_text(), re.M)
    return {name: why for names, why in table for name in re.findall(r"`(test_\S+)`", names)}


def test_the_page_gives_a_reason_for_each_test_that_fails() -> None:
    reasons = not_passing()
    assert 10 < len(reasons) < 20
    assert all(len(why) > 20 for why in reasons.values())


def write_tests(folder: Path, models: Path, rows: Path) -> None:
    """Copy TRL's tests, with our trainer and this disk's models and rows."""
    assert FOLDER is not None
    (folder / "trl_tests").mkdir()
    (folder / "trl_tests" / "__init__.py").touch()
    for name in ("testing_utils.py", "test_grpo_trainer.py"):
        text = Path(FOLDER, name).read_text()
        if name.startswith("test_"):
            assert _IMPORT in text
            ours = (
                "import functools\n"
                "from turnwise.trl import GRPOConfig, GRPOTrainer\n"
                f"GRPOConfig = functools.partial(GRPOConfig, turnwise={_OURS})\n"
            )
            text = text.replace(_IMPORT, ours).replace(f"{HUB}/zen", str(rows))
        (folder / "trl_tests" / name).write_text(text.replace(f"{HUB}/", f"{models}/"))


def outcomes(report: Path, models: Path) -> dict[str, str]:
    """Return "passed", "skipped", or an error's first line, by a test's name."""
    found = {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        if case.attrib["classname"].endswith(LEFT_OUT):
            continue
        said = next((child for child in case if child.tag != "system-out"), None)
        outcome = "passed"
        if said is not None:
            message = said.attrib.get("message", "").partition("\n")[0]
            outcome = "skipped" if said.tag == "skipped" else message or said.tag
        found[case.attrib["name"].replace(f"{models}/", "")] = outcome
    return found


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.skipif(FOLDER is None, reason="TRL_TESTS names no folder of TRL's tests")
def test_trls_own_tests_pass_but_for_those_with_a_reason(tokenizer: Any, tmp_path: Path) -> None:
    models, rows = tmp_path / "models", tmp_path / "zen"
    make_models(tokenizer, models)
    make_rows(rows)
    write_tests(tmp_path, models, rows)
    report = tmp_path / "report.xml"
    chosen = os.environ.get("TRL_TESTS_K", " and ".join(f"not {name}" for name in LEFT_OUT))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=900"),
            *(f"--junitxml={report}", "-k", chosen, "trl_tests/test_grpo_trainer.py"),
        ],
        env={
            **command_environment(),
            "PYTHONPATH": f"{ROOT / 'src'}:{tmp_path}:{Path(FOLDER or '').parent}",
            "HF_HUB_OFFLINE": "1",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert report.is_file(), done.stdout[-4000:] + done.stderr[-4000:]
    found = outcomes(report, models)
    expected = not_passing().keys()
    failed = {
        name: outcome
        for name, outcome in found.items()
        if outcome not in ("passed", "skipped") and not {name, name.partition("[")[0]} & expected
    }
    assert failed == {}, done.stdout[-8000:]
    if "TRL_TESTS_K" not in os.environ:
        assert sum(outcome == "passed" for outcome in found.values()) >= 95
