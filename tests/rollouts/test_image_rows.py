"""Images in rows: paths beside their file, files as Hugging Face's datasets keep them, URLs."""

import json
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from datasets import Dataset, Features, Image, List, Value

from tests.rollouts.test_image_rollouts import play
from tests.vision import encoded, picture, vision_config
from turnwise.chat.images import read_image, read_parts
from turnwise.errors import InputError
from turnwise.rollouts import load_rows
from turnwise.rollouts.data import checked_rows, load_training
from turnwise.trajectory import Trajectory, audit, write_jsonl

PICTURE = encoded(picture())


def placed_beside(folder: Path) -> Path:
    (folder / "pictures").mkdir()
    (folder / "pictures" / "1.png").write_bytes(PICTURE)
    return folder / "rows.jsonl"


def shows(image: object) -> bool:
    """Return whether a value of a row is the picture, or a list of it."""
    given = image if isinstance(image, list) else [image]
    return all(read_image(one, "an image").read() == PICTURE for one in given)


def test_paths_in_rows_begin_at_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, name = placed_beside(tmp_path), "pictures/1.png"
    url = {"type": "image_url", "image_url": {"url": name}}
    parts = [url, {"type": "image", "path": name}, {"type": "image", "image": name}]
    said = [{"role": "user", "content": [{"type": "text", "text": "What?"}, *parts]}]
    row = {"image": name, "images": [name, {"path": name}], "prompt": said, "text": name}
    file.write_text(json.dumps(row) + "\n" + json.dumps({"image": "a cat", "n": 1}) + "\n")
    monkeypatch.chdir(tmp_path.parent)
    first, second = load_rows(str(file.relative_to(tmp_path.parent)), split="train")
    monkeypatch.chdir("/")
    assert shows(first["image"])
    assert shows(first["images"])
    assert first["text"] == name
    for message in first["prompt"]:
        text, *images = read_parts(message, "a message")["content"]
        assert text["text"] == "What?"
        assert [shows(part["image"]) for part in images] == [True] * 3
    assert second == {"image": "a cat", "n": 1}
    own = {"turns": 3, "images": {"before": "pictures/1.png"}}  # a row, not a trajectory
    file.write_text(json.dumps(own))
    assert list(load_rows(str(file), split="train")) == [own]


def test_a_table_names_images_too(tmp_path: Path) -> None:
    file = placed_beside(tmp_path).with_suffix(".csv")
    file.write_text("image,answer\npictures/1.png,7\n")
    (row,) = load_rows(str(file), split="train")
    assert shows(row["image"])


def write_parquet(rows: Dataset, path: Path) -> Path:
    rows.to_parquet(path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def save(rows: Dataset, path: Path) -> Path:
    rows.save_to_disk(path)
    return path


@pytest.mark.parametrize("write", [write_parquet, save])
def test_images_of_datasets_are_their_files_whatever_they_are_in(
    tmp_path: Path, write: Callable[[Dataset, Path], Path]
) -> None:
    part = Features({"type": Value("string"), "text": Value("string"), "image": Image()})
    message = Features({"role": Value("string"), "content": List(part)})
    features = Features({"image": Image(), "images": List(Image()), "messages": List(message)})
    content = [{"type": "text", "text": "?", "image": None}]
    content += [{"type": "image", "text": None, "image": {"bytes": PICTURE, "path": None}}]
    given = {"bytes": PICTURE, "path": "1.png"}
    row = {
        "image": given,
        "images": [given] * 2,
        "messages": [{"role": "user", "content": content}],
    }
    made = Dataset.from_list([row, row], features=features)
    rows = load_rows(str(write(made, tmp_path / "rows")), split="train")
    assert len(rows) == 2
    for read in rows:
        assert read["image"]["bytes"] == PICTURE
        assert shows(read["images"])
        (text, image) = read_parts(read["messages"][0], "a message")["content"]
        assert text == {"type": "text", "text": "?"}
        assert shows(image["image"])


def test_rows_with_images_are_not_read_at_once() -> None:
    read = []

    class Rows(list[dict[str, Any]]):
        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return super().__getitem__(index)

    for image in (picture(), PICTURE, [{"bytes": PICTURE, "path": None}], "data:image/png,"):
        read.clear()
        rows = checked_rows(Rows([{"image": image, "n": n} for n in range(3)]), "rows", None)
        assert (len(rows), {*read}) == (3, {0})
        assert rows[2]["n"] == 2
    named = [{"image": "pictures/1.png"}]
    assert checked_rows(named, "rows", None) == named


def test_a_broken_file_in_a_dataset_costs_only_who_reads_it(tmp_path: Path) -> None:
    files = [{"bytes": PICTURE, "path": None}, {"bytes": PICTURE[:99], "path": None}]
    made = Dataset.from_dict({"image": files}, features=Features({"image": Image()}))
    good, broken = load_rows(str(save(made, tmp_path / "rows")), split="train")
    assert shows(good["image"])
    with pytest.raises(InputError, match="is a broken png file"):
        read_image(broken["image"], "an image")


def test_a_parquet_file_names_paths_beside_it(tmp_path: Path) -> None:
    file = placed_beside(tmp_path).with_suffix(".parquet")
    parquet.write_table(arrow.Table.from_pylist([{"image": "pictures/1.png"}]), file)
    (row,) = load_rows(str(file), split="train")
    assert shows(row["image"])


def problems(vision_path: str, file: Path, allowed: bool) -> Any:
    data = {"path": str(file), "allow_urls": allowed, "shuffle": False}
    return load_training(vision_config(vision_path, data=data))


def test_only_allowed_urls_are_fetched_and_broken_ones_stay(
    vision_path: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = placed_beside(tmp_path)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    serve = partial(Quiet, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}"
        names = [f"{base}/pictures/1.png", f"{base}/missing.png", "http://169.254.169.254/"]
        file.write_text("".join(json.dumps({"image": {"url": name}}) + "\n" for name in names))
        closed = problems(vision_path, file, False)
        assert [problem.row["image"]["url"] for problem in closed] == names
        with monkeypatch.context() as patch:
            patch.setattr("turnwise.core.fetch._is_public", lambda address: address == "127.0.0.1")
            rows = [problem.row for problem in problems(vision_path, file, True)]
        assert shows(rows[0]["image"]["url"])
        assert [row["image"]["url"] for row in rows[1:]] == names[1:]
        assert "missing.png answered with status 404" in caplog.text
        assert "no image may be fetched from 169.254.169.254" in caplog.text
        with pytest.raises(InputError, match="is a URL"):
            read_image(rows[1]["image"], "an image")
        caplog.clear()
        rows = [problem.row for problem in problems(vision_path, file, True)]
        assert [row["image"]["url"] for row in rows] == names  # this network is not asked
        assert caplog.text.count("is not public") == 3
        server.shutdown()


async def test_trajectories_of_a_run_are_rows_with_their_images(
    vision_path: str, tmp_path: Path
) -> None:
    trajectories, _ = await play(vision_path)
    write_jsonl(tmp_path / "trajectories" / "step-0001.jsonl", trajectories)
    for row, before in zip(load_rows(str(tmp_path), split="train"), trajectories, strict=True):
        again = Trajectory.from_tree(row)
        assert again == before
        assert audit(again).percent == 100.0
        for key, image in again.images.items():
            assert image.read() == before.images[key].read()
