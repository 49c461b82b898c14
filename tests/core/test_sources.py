"""What is on the Hub or in its cache is found; what is in neither fails at once."""

import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from turnwise.core import sources
from turnwise.core.sources import check_model, may_be_on_hub, why_offline
from turnwise.errors import InputError
from turnwise.rollouts import load_rows


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What looking changes in this process is undone."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def nobody(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub's address is one where no answer comes."""
    monkeypatch.setenv("HF_ENDPOINT", silent)
    monkeypatch.setattr(sources, "_SECONDS", 0.1)


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B", "openai/gsm8k", "a_b/c.d-e_1"])
def test_names_of_models_and_datasets_may_be_on_the_hub(name: str) -> None:
    assert may_be_on_hub(name)


@pytest.mark.parametrize("path", ["../model", "/model", "~/model", "a/b/c", "model/", "", "a b"])
def test_paths_are_not_looked_for_on_the_hub(path: str) -> None:
    assert not may_be_on_hub(path)


class Refusing(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_error(403)

    def log_message(self, *said: object) -> None: ...


def test_a_hub_that_answers_at_all_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_SECONDS", 60.0)
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert why_offline() == ""
        server.shutdown()
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.usefixtures("nobody")
def test_a_hub_that_does_not_answer_is_asked_no_more(silent: str) -> None:
    assert why_offline() == f"{silent} cannot be reached"
    assert constants.HF_HUB_OFFLINE
    assert os.environ["HF_HUB_OFFLINE"] == "1", "for the processes of engines and trainer"
    assert why_offline() == "HF_HUB_OFFLINE is set"


@pytest.mark.usefixtures("nobody")
def test_a_dataset_that_is_nowhere_fails_at_once() -> None:
    message = "there is no file or folder nowhere, http://.* cannot be reached, and the .* cache"
    with pytest.raises(InputError, match=message):
        load_rows("nowhere", split="train")


@pytest.mark.usefixtures("nobody")
def test_a_model_that_is_nowhere_fails_at_once() -> None:
    message = (
        "model.path: there is no folder no/where, http://.* cannot be reached, and the .* cache"
    )
    with pytest.raises(InputError, match=message):
        check_model("no/where")


@pytest.mark.usefixtures("nobody")
def test_a_model_in_the_cache_is_used_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models--some--model"
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    check_model("some/model")
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(InputError, match=rf"model\.path: there is no model in {path} \(a fold"):
            check_model(str(path))


@pytest.mark.usefixtures("nobody")
def test_a_packaged_model_is_suggested() -> None:
    with pytest.raises(InputError, match=r"no such model; did you mean smollm2\?"):
        check_model("smollm")
    with pytest.raises(InputError, match=r"no such model$"):
        check_model("quartz")
