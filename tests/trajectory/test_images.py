"""A prompt continues a turn only if its images are the same at the same positions."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from turnwise.errors import InputError, TrajectoryError
from turnwise.trajectory import (
    Image,
    PlacedImage,
    Prompt,
    Trajectory,
    audit,
    read_jsonl,
    write_jsonl,
)
from turnwise.trajectory.files import remove_files
from turnwise.trajectory.images import FOLDER, restored, save_images
from turnwise.trajectory.prefix import replace_prefix
from turnwise.trajectory.prompt import put_in_place
from turnwise.trajectory.training_trace import (
    export_traces,
    from_training_trace,
    import_traces,
    to_training_trace,
)

RED, BLUE = (Image.of(data, "png", 28, 28) for data in (b"red", b"blue"))
PAD = 9


class Tokens:
    """A processor whose images are two or three ids."""

    marker = PAD

    def ids_of(self, image: Image) -> Prompt:
        length = 2 if image == RED else 3
        return Prompt([PAD] * length, [PlacedImage(image, 0, length)])


def with_images(ids: list[int], *images: Image) -> Prompt:
    return put_in_place(ids, images, Tokens())


def two_turns(second: Image = RED) -> Trajectory:
    """An image in the first prompt, and one in the second."""
    trajectory = Trajectory("p")
    first = with_images([1, PAD, 2], RED)
    trajectory.add_turn(first, [5, 6], [-0.5, -0.1], [0, 0], "stop")
    following = Prompt.joined(first, [5, 6], with_images([3, PAD, 4], second))
    trajectory.add_turn(following, [7], [-0.2], [1], "stop")
    return trajectory


def test_each_marker_becomes_the_ids_of_its_image() -> None:
    prompt = with_images([1, PAD, 2, PAD], BLUE, RED)
    assert prompt.tolist() == [1, PAD, PAD, PAD, 2, PAD, PAD]
    assert prompt.images == (PlacedImage(BLUE, 1, 3), PlacedImage(RED, 5, 2))


@pytest.mark.parametrize("ids", [[1, 2], [PAD, 1, PAD]])
def test_a_marker_in_a_text_or_an_image_left_out_is_refused(ids: list[int]) -> None:
    with pytest.raises(TrajectoryError, match="marker") as error:
        with_images(ids, RED)
    assert error.value.reason == "image_marker"


def test_turns_keep_the_images_that_they_add() -> None:
    trajectory = two_turns(BLUE)
    assert [t.images for t in trajectory.turns] == [
        [PlacedImage(RED, 1, 2)],
        [PlacedImage(BLUE, 7, 3)],
    ]
    assert [t.fork_reason for t in trajectory.turns] == [None, None]
    prompt = trajectory.prompt(1)
    assert prompt.images == (PlacedImage(RED, 1, 2), PlacedImage(BLUE, 7, 3))
    (branch,) = trajectory.samples()
    assert branch.images == prompt.images
    assert audit(trajectory).percent == 100.0
    assert audit(trajectory).violations == 0


def test_another_image_of_the_same_ids_begins_a_branch() -> None:
    trajectory = Trajectory("p")
    other = replace(RED, hash="0" * 32)
    first = Prompt([1, PAD, PAD, 2], [PlacedImage(RED, 1, 2)])
    trajectory.add_turn(first, [5], [-0.5], [0], "stop")
    ids = first.tolist()
    changed = Prompt([*ids, 5, 3], [PlacedImage(other, 1, 2)])
    turn = trajectory.add_turn(changed, [6], [-0.5], [0], "stop")
    assert (turn.parent, turn.prefix_length, turn.fork_reason) == (0, 1, "image_changed")
    turn = trajectory.add_turn([*ids, 5, 3], [6], [-0.5], [0], "stop")  # without any
    assert turn.prefix_length == 1
    again = Prompt.joined(first, [5, 4])
    turn = trajectory.add_turn(again, [6], [-0.5], [0], "stop")
    assert (turn.parent, turn.prefix_length, turn.fork_reason) == (0, 5, None)
    assert [[*branch.images] for branch in trajectory.branches()] == [
        [PlacedImage(other, 1, 2)],
        [],
        [PlacedImage(RED, 1, 2)],
    ]
    report = audit(trajectory)
    assert (report.violations, report.percent) == (0, 100.0)


def test_forced_tokens_keep_the_images() -> None:
    trajectory = Trajectory("p")
    prompt = with_images([1, PAD], RED)
    trajectory.add_turn(prompt, [5, 6, 7], [-0.5, 0.0, -0.1], [0, -1, 0], "stop")
    following = Prompt.joined(prompt, [5, 6, 7, 8])
    assert trajectory.add_turn(following, [2], [-0.5], [0], "stop").added_token_ids == [8]
    assert audit(trajectory).violations == 0
    assert trajectory.samples()[0].images == prompt.images


def test_the_audit_finds_a_moved_and_a_replaced_image() -> None:
    for wrong in (PlacedImage(RED, 2, 2), PlacedImage(BLUE, 1, 2)):
        trajectory = two_turns()
        (first, _) = trajectory.turns
        trajectory.turns[0] = replace(first, added=Prompt(first.added.ids, [wrong]))
        assert "images" in str(audit(trajectory).first_violation)
    trajectory = two_turns()
    (sample,) = trajectory.samples()
    report = audit(trajectory, [replace(sample, ids=Prompt(sample.ids.ids, sample.images[:1]))])
    assert report.tokens_exact == 0
    assert "its images are not those that turn 1 had" in str(report.first_violation)


def test_json_holds_hashes_and_the_folder_each_image_once(tmp_path: Path) -> None:
    trajectory = two_turns(BLUE)
    part = {"type": "image", "image": RED}
    trajectory.messages = [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]
    path = tmp_path / "trajectories" / "step-0001.jsonl"
    write_jsonl(path, [trajectory, trajectory])
    names = sorted(file.name for file in (path.parent / "images").iterdir())
    assert names == sorted([RED.name, BLUE.name])
    assert "red" not in path.read_text()
    for read in read_jsonl(path):
        assert read == trajectory
        assert read.images[BLUE.hash].read() == b"blue"
        assert read.messages[0]["content"][0]["image"] == RED
        assert audit(read).violations == 0
        read.add_turn(Prompt.joined(read.prompt(1), [7, 8]), [1], [-1.0], [1], "stop")
        assert read.turns[-1].fork_reason is None
    with pytest.raises(TrajectoryError, match="is not here") as error:
        Trajectory.from_json(trajectory.to_json()).images[RED.hash].read()
    assert error.value.reason == "image_lost"
    (path.parent / "images" / RED.name).write_bytes(b"green")
    with pytest.raises(TrajectoryError, match="has been changed"):
        read.images[RED.hash].read()


def test_an_image_may_be_written_by_several_at_once(tmp_path: Path) -> None:
    image = Image.of(b"x" * 4_000_000, "png", 28, 28)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            [*pool.map(lambda _: save_images(tmp_path, [image]), range(8))]
            assert [path.name for path in tmp_path.iterdir()] == [image.name]
            (tmp_path / image.name).unlink()


def test_a_whole_line_needs_no_folder() -> None:
    line = two_turns().to_json(whole=True)
    tree = json.loads(line)
    assert Trajectory.from_tree(tree).images[RED.hash].read() == b"red"
    assert json.loads(line) == tree


def shown_twice() -> Trajectory:
    """Two turns with images, and messages that show them."""
    trajectory = two_turns(BLUE)
    parts = [{"type": "image", "image": image} for image in (RED, BLUE)]
    trajectory.messages = [{"role": "user", "content": [part]} for part in parts]
    messages = [dict(message) for message in trajectory.messages]
    trajectory.turns[1] = replace(trajectory.turns[1], messages=messages)
    return trajectory


def test_a_training_trace_has_its_images_inside(tmp_path: Path) -> None:
    trajectory = shown_twice()
    trace = json.loads(json.dumps(to_training_trace(trajectory)))
    again = from_training_trace(trace)
    assert again == trajectory
    assert [image.read() for image in again.images.values()] == [b"red", b"blue"]
    assert again.messages[1]["content"][0]["image"] == BLUE
    assert audit(again).violations == 0
    write_jsonl(tmp_path / "one" / "step-0001.jsonl", [trajectory])
    export_traces(tmp_path / "one" / "step-0001.jsonl", tmp_path / "traces.jsonl")
    import_traces(tmp_path / "traces.jsonl", tmp_path / "two" / "step-0001.jsonl")
    assert [*read_jsonl(tmp_path / "two" / "step-0001.jsonl")] == [trajectory]
    assert (tmp_path / "two" / "images" / RED.name).read_bytes() == b"red"


@pytest.mark.parametrize("what", ["moved", "gone", "other bytes", "a path"])
def test_a_trace_whose_images_were_changed_is_refused(what: str) -> None:
    trace = to_training_trace(shown_twice())
    first, second = (turn["metadata"]["turnwise"] for turn in trace["turns"])
    if what == "moved":
        second["images"][0][1] += 1
    elif what == "gone":
        del first["files"][BLUE.hash]
    elif what == "other bytes":
        first["files"][RED.hash]["data"] = first["files"][BLUE.hash]["data"]
    else:
        first["files"]["../../evil"] = first["files"].pop(RED.hash)
    with pytest.raises(InputError, match=r"trace, turn [01]: its images"):
        from_training_trace(trace)


def test_no_line_names_a_file_outside_its_folder(tmp_path: Path) -> None:
    tree = json.loads(two_turns().to_json())
    (known,) = tree["images"].values()
    for key in ("../" * 3 + "a" * 32, "A" * 32, ""):
        tree["images"][key] = known
        with pytest.raises(TrajectoryError, match="is not the name of its bytes"):
            Trajectory.from_tree(tree, tmp_path)
        del tree["images"][key]
    known["format"] = "svg"
    with pytest.raises(TrajectoryError, match="is not the name of its bytes"):
        Trajectory.from_tree(tree, tmp_path)


def test_a_text_has_no_trace_of_images_in_json() -> None:
    trajectory = Trajectory("p")
    trajectory.add_turn([1], [2], [-1.0], [0], "stop")
    assert "image" not in trajectory.to_json()
    assert type(trajectory.prompt_token_ids(0)) is list


def test_the_models_ids_are_put_back_with_their_images() -> None:
    class Tokenizer:
        eos_token_id = 2

        def decode(self, ids: list[int]) -> str:
            return " ".join(map(str, ids))

    model = Prompt.joined(with_images([11, PAD], RED), [20, 2])
    before = Prompt.joined(with_images([11, PAD], RED), [20, 2])
    whole = Prompt.joined(before, with_images([12, PAD, 13], BLUE))
    spliced = replace_prefix(Tokenizer(), model, before, whole)
    assert spliced == whole
    assert spliced.images == whole.images
    with pytest.raises(TrajectoryError, match="other images"):
        replace_prefix(Tokenizer(), model.tolist(), before, whole)


def test_an_image_that_is_lost_or_changed_is_named_by_its_code(tmp_path: Path) -> None:
    save_images(tmp_path, [RED])
    stored = replace(RED, data=b"", folder=tmp_path)
    assert stored.read() == b"red"
    for change, message in (
        (lambda file: file.write_bytes(b"dark"), "has been changed"),
        (Path.unlink, "No such file"),
    ):
        change(tmp_path / stored.name)
        with pytest.raises(TrajectoryError, match=message) as caught:
            stored.read()
        assert caught.value.reason == "image_lost"
        assert stored.name in str(caught.value)


def test_a_prompt_is_never_cut_within_an_image() -> None:
    prompt = Prompt([1, PAD, PAD, 2], [PlacedImage(RED, 1, 2)])
    assert prompt[1:3].images[0].start == 0
    with pytest.raises(TrajectoryError, match="at positions 1 to 3") as caught:
        prompt[:2]
    assert caught.value.reason == "image_cut"


def test_a_hash_without_an_image_stays_a_hash() -> None:
    message = {"role": "user", "content": [{"type": "image", "image": "unknown"}]}
    assert restored([message], {RED.hash: RED}) == [message]


def test_removed_files_take_the_images_that_no_other_file_has(tmp_path: Path) -> None:
    for name, images in (("one", [RED, BLUE]), ("two", [BLUE])):
        made = Trajectory(name)
        ids = [PAD] * len(images)
        placed = [PlacedImage(image, at, 1) for at, image in enumerate(images)]
        made.add_turn(Prompt(ids, placed), [2], [-0.5], [0], "stop")
        write_jsonl(tmp_path / f"{name}.jsonl", [made])
    folder = tmp_path / FOLDER
    assert {file.name for file in folder.iterdir()} == {RED.name, BLUE.name}
    remove_files([tmp_path / "one.jsonl"])
    assert {file.name for file in folder.iterdir()} == {BLUE.name}
    remove_files([tmp_path / "two.jsonl"])
    assert not [*folder.iterdir()]
