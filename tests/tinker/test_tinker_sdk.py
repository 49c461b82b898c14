"""Tinker's official SDK, unmodified, against `turnwise tinker` with a real engine and trainer."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT, command_environment, python
from tests.vision import encoded, picture

SDK = ROOT / ".venv-tinker"


@pytest.fixture(scope="module")
def sdk() -> dict[str, str]:
    """The environment of a program that can import the SDK."""
    subprocess.run(["make", "-s", ".venv-tinker/.installed"], cwd=ROOT, check=True, timeout=900)
    return {**os.environ, "PYTHONPATH": str(SDK)}


@contextmanager
def serving(model: str, folder: Path) -> Iterator[str]:
    """Run a server, and yield its URL."""
    log = folder / "log"
    command = [*python(), "-m", "turnwise.cli", "tinker", "--model", model, "--port", "0"]
    changes = ["model.max_length=128", f"output_dir={folder}", "training.threads=1"]
    with log.open("w") as file:
        server = subprocess.Popen(
            [*command, *changes],
            cwd=ROOT,
            env=command_environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    ends = time.monotonic() + 300
    while "TINKER_BASE_URL=" not in log.read_text():
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < ends, log.read_text()
        time.sleep(0.05)
    yield log.read_text().partition("TINKER_BASE_URL=")[2].split()[0]
    server.send_signal(signal.SIGINT)
    assert server.wait(60) == 130


@pytest.fixture(scope="module")
def url(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(model_path, tmp_path_factory.mktemp("tinker")) as url:
        yield url


@pytest.fixture(scope="module")
def seen(sdk: dict[str, str], url: str, model_path: str) -> dict[str, Any]:
    return printed("sdk_program.py", sdk, url, model_path)


def printed(program: str, sdk: dict[str, str], *arguments: str) -> dict[str, Any]:
    """Return what a program saw."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "tinker" / program), *arguments],
        env=sdk,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_loop_of_training_and_sampling_runs_unmodified(seen: dict[str, Any]) -> None:
    assert seen["info"] == 4
    assert seen["losses"][-1] < seen["losses"][0]
    assert [len(tokens) for tokens in seen["tokens"]] == [len(own) for own in seen["logprobs"]]
    assert seen["step"]["grad_norm"] > 0
    assert seen["named"] == 1
    assert seen["scores"][0] is None
    assert seen["custom"]["loss:sum"] == pytest.approx(seen["custom"]["surrogate_loss:sum"])


@pytest.mark.slow
def test_the_engine_and_the_trainer_give_one_log_prob(seen: dict[str, Any]) -> None:
    for sampled, scored in zip(seen["logprobs"], seen["scored"], strict=True):
        np.testing.assert_allclose(sampled, scored, atol=1e-5)


@pytest.mark.slow
def test_the_losses_of_reinforcement_differ_as_they_should(seen: dict[str, Any]) -> None:
    assert len({seen[name] for name in ("ppo", "cispo", "dro", "gspo")}) == 4
    assert seen["beta"] > seen["dro"]


@pytest.mark.slow
def test_likeliest_tokens_score_alike_in_engine_and_trainer(seen: dict[str, Any]) -> None:
    top = seen["top"]
    np.testing.assert_allclose(top["engine"], np.reshape(top["trainer"], (-1, 4)), atol=1e-5)
    assert np.all(np.diff(top["engine"]) <= 0)
    assert top["likeliest"] == 2
    assert [value is None for value in top["last"]] == [True] * 4 + [False] * 2


@pytest.mark.slow
def test_an_image_is_the_same_to_the_engine_and_the_trainer(
    sdk: dict[str, str], vision_path: str, tmp_path: Path
) -> None:
    file = tmp_path / "image.png"
    file.write_bytes(encoded(picture()))  # of 2 x 3 squares
    with serving(vision_path, tmp_path) as url:
        seen = printed("sdk_images_program.py", sdk, url, vision_path, str(file), "6")
    assert seen["losses"][-1] < seen["losses"][0]
    for sampled, scored in zip(seen["sampled"], seen["scored"], strict=True):
        np.testing.assert_allclose(sampled, scored, atol=1e-4)
    assert seen["uncounted"] == 1
    assert "expected_tokens of an image is 7, and the model makes 6" in seen["wrong"]


@pytest.mark.slow
def test_errors_reach_the_program_as_the_sdk_raises_them(seen: dict[str, Any]) -> None:
    assert seen["nan"].startswith("RequestFailedError user: ")
    assert "no finite number" in seen["nan"]
    assert "does not compute stable_reinforce" in seen["stable"]
    assert seen["rest"].startswith("NotFoundError")
    assert seen["who"].startswith("tml:organization_user:")
    assert seen["sessions"] >= 1


@pytest.mark.slow
def test_the_messages_are_the_sdks(sdk: dict[str, str]) -> None:
    """Compare the table of fields with the SDK's descriptors."""
    program = """
import json
from tinker.proto import tinker_public_pb2
messages = tinker_public_pb2.DESCRIPTOR.message_types_by_name
fields = lambda message: {f.name: [f.number, f.is_repeated] for f in message.fields}
print(json.dumps({name: fields(message) for name, message in messages.items()}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=sdk, capture_output=True, text=True, check=True
    )
    known = json.loads(done.stdout)
    from turnwise.tinker.wire import message_classes

    for name, kind in message_classes().items():
        own = {field.name: [field.number, field.is_repeated] for field in kind.DESCRIPTOR.fields}
        assert own.items() <= known[name].items(), name


@pytest.mark.slow
def test_a_service_client_has_a_server_of_its_own(
    sdk: dict[str, str], tmp_path: Path, model_path: str
) -> None:
    """Run the example, which has nothing but `turnwise.tinker.ServiceClient`."""
    command = [sys.executable, "-m", "examples.tinker.loop", "--model", model_path, "--steps", "2"]
    environment = {**command_environment(), **sdk, "PYTHONPATH": f"{SDK}:{ROOT}"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    assert "step 2  tokens" in done.stdout
    assert "saved tinker://" in done.stdout


@pytest.mark.slow
def test_recipes_of_the_cookbook_run_unmodified(sdk: dict[str, str], tmp_path: Path) -> None:
    """Run two of them; `python -m tests.tinker.recipes` runs all."""
    command = [sys.executable, "-m", "tests.tinker.recipes", "--folder", str(tmp_path)]
    done = subprocess.run(
        [*command, "--only", "sl_loop", "tool_use"],
        cwd=ROOT,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert "| sl_loop | ran | " in done.stdout, done.stdout + done.stderr
    assert "| tool_use | ran | " in done.stdout, done.stdout + done.stderr
