"""Images in the viewer: its routes, exported pages, and the comparison with the chat template."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.vision import asked, encoded, picture, vision_config
from turnwise.chat.images import read_parts
from turnwise.chat.template import load_template, load_tokenizer
from turnwise.config import Config, ModelConfig, dump_config
from turnwise.trajectory import (
    ChatTemplate,
    Image,
    Message,
    Outcome,
    Prompt,
    Trajectory,
    write_jsonl,
)
from turnwise.trajectory.images import data_url
from turnwise.viewer import server
from turnwise.viewer.run_files import open_runs
from turnwise.viewer.template_diff import comparison

TOKEN, PORT = "a-token-that-is-random", 8123
FILE = "/api/runs/demo/files/step-0001"


@pytest.fixture(scope="module")
def seeing(vision_path: str) -> ChatTemplate:
    config = vision_config(vision_path)
    return load_template(config.model, config.sampling, config.engine, load_tokenizer(config.model))


def played(template: ChatTemplate) -> Trajectory:
    """An image in the question, and another in the second message of the user."""
    trajectory = Trajectory("pictures:1", status="completed", outcome=Outcome(1.0))
    messages: list[Message] = [
        read_parts(asked("What is it?", picture()), "a message"),
        {"role": "assistant", "content": "a cat"},
        read_parts(asked(picture(84, 56, 1), "And this?"), "a message"),
        {"role": "assistant", "content": "a dog"},
    ]
    first = template.render(messages[:1])
    answers = [template.encode(f"{word}<|im_end|>") for word in ("a cat", "a dog")]
    trajectory.add_turn(first, answers[0], [-0.5] * len(answers[0]), [0] * len(answers[0]), "stop")
    text = f"\n{template.render_text(messages[2:3])}"
    second = Prompt.joined(
        first, answers[0], template.with_images(template.encode(text), messages[2:3])
    )
    trajectory.add_turn(second, answers[1], [-0.5] * len(answers[1]), [0] * len(answers[1]), "stop")
    trajectory.messages = messages
    return trajectory


@pytest.fixture
def folder(tmp_path: Path, seeing: ChatTemplate) -> Path:
    run = tmp_path / "runs" / "demo"
    run.mkdir(parents=True)
    config = Config(model=ModelConfig(path=str(seeing.tokenizer.name_or_path)))
    (run / "config.yaml").write_text(dump_config(config))
    write_jsonl(run / "trajectories" / "step-0001.jsonl", [played(seeing)] * 2)
    return run


def opened(folder: Path) -> TestClient:
    app = server.make_app(open_runs([folder]), TOKEN, PORT)
    client = TestClient(app, base_url=f"http://127.0.0.1:{PORT}", raise_server_exceptions=False)
    assert client.get(f"/?token={TOKEN}").status_code == 200
    return client


def images_of(folder: Path) -> list[Path]:
    return sorted((folder / "trajectories" / "images").iterdir())


def test_an_image_is_served_only_to_a_client_with_the_token(folder: Path) -> None:
    client = opened(folder)
    assert len(images_of(folder)) == 2
    for path in images_of(folder):
        answer = client.get(f"{FILE}/images/{path.name}")
        assert (answer.status_code, answer.content) == (200, path.read_bytes())
        assert answer.headers["content-type"] == "image/png"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "img-src 'self'" in answer.headers["content-security-policy"]
    client.cookies.clear()
    assert client.get(f"{FILE}/images/{path.name}").status_code == 403


def _symlinked(path: Path) -> str:
    other = path.with_name(f"{'a' * 32}.png")
    other.symlink_to(path.parents[3] / "secret.png")
    return other.name


def _changed(path: Path) -> str:
    path.write_bytes(b"<svg onload=alert(1)>")
    return path.name


def _as_svg(path: Path) -> str:
    return path.rename(path.with_suffix(".svg")).name


@pytest.mark.parametrize(
    "name_of",
    [_symlinked, _changed, _as_svg, lambda _: "..%2fstep-0001.jsonl", lambda _: "b" * 32 + ".png"],
)
def test_nothing_else_is_served_as_an_image(folder: Path, name_of: Callable[[Path], str]) -> None:
    (folder.parent / "secret.png").write_bytes(encoded(picture(seed=7)))
    name = name_of(images_of(folder)[0])
    answer = opened(folder).get(f"{FILE}/images/{name}")
    assert answer.status_code == (422 if name_of is _changed else 404)
    assert answer.headers["content-type"].startswith(("application/json", "text/plain"))


def test_a_line_has_images_by_hash_and_its_audit_is_exact(folder: Path) -> None:
    client = opened(folder)
    tree = client.get(f"{FILE}/0").json()
    (first, start, length), *_ = tree["turns"][0]["images"]
    assert tree["images"][first] == {"format": "png", "width": 56, "height": 84}
    assert tree["messages"][0]["content"][1] == {"type": "image", "image": first}
    ids = tree["turns"][0]["added_token_ids"][start : start + length]
    assert len({*ids}) == 1
    audit = client.get(f"{FILE}/0/audit").json()
    assert (audit["violations"], audit["tokens_exact"]) == (0, audit["tokens_sampled"])
    summary = client.get(FILE).json()["trajectories"][0]
    assert summary["question"] == "What is it?[image]"


@pytest.mark.parametrize("room", [1 << 20, 0])
def test_an_exported_page_has_its_images_inside_up_to_a_limit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(server, "_IMAGES", room)
    target = tmp_path / "page.html"
    server.write_page(folder, target, None, False, None)
    page = target.read_text()
    data = json.loads(page.partition('id="embedded">')[2].partition("</script>")[0])
    urls = {key: url for key, url in data["answers"].items() if "/images/" in key}
    assert "img-src data:" in page
    assert len(urls) == (2 if room else 0)
    for path in images_of(folder) if room else []:
        image = Image.of(path.read_bytes(), "png", 0, 0)
        assert urls[f"{FILE}/images/{path.name}"] == data_url(image)
    images_of(folder)[0].unlink()
    server.write_page(folder, target, None, False, 0)  # what is gone is left out


def test_the_comparison_with_the_template_is_of_texts_alone(seeing: ChatTemplate) -> None:
    compare = comparison(Path(seeing.tokenizer.name_or_path) / "tokenizer.json")
    assert "has images" in compare(played(seeing), 1)["error"]
