"""Versions as files: whole or not at all."""

import multiprocessing
import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.weights.links import assert_same, some_tensors
from tests.weights.trainer import Named
from turnwise.errors import InputError, WeightUpdateError
from turnwise.weights.disk import DiskSender, load, validate
from turnwise.weights.manifest import Manifest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_bytes", [4000, 2**30])
def test_a_version_is_read_as_it_was_written(
    tmp_path: Path, dtype: torch.dtype, shard_bytes: int
) -> None:
    tensors = some_tensors()
    sender = DiskSender(tensors, dtype, tmp_path, shard_bytes)
    manifest = sender.publish(3, iter(tensors))
    assert Manifest.from_dict(manifest.to_dict()) == manifest
    validate(manifest)
    assert_same(list(load(manifest)), tensors, dtype)
    files = list(Path(manifest.path).iterdir())
    assert (len(files) > 4) == (shard_bytes == 4000)


def test_the_last_two_versions_are_kept_whatever_their_numbers(tmp_path: Path) -> None:
    tensors = some_tensors()
    sender = DiskSender(tensors, torch.float32, tmp_path)
    manifests = {version: sender.publish(version, tensors) for version in (7, 8, 2, 3, 3)}
    assert sorted(os.listdir(tmp_path)) == ["version-2", "version-3"]
    validate(manifests[2])
    validate(manifests[3])
    with pytest.raises(WeightUpdateError, match="must see the same folder"):
        validate(manifests[8])


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_short, r"shard-00002.safetensors in .*version-1 of version 1 is incomplete"),
        (os.unlink, r"\w+ is missing from .*version-1"),
    ],
)
def test_a_version_that_is_not_whole_is_refused(
    tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    tensors = some_tensors()
    manifest = DiskSender(tensors, torch.float32, tmp_path, 4000).publish(1, tensors)
    damage(Path(manifest.path) / "shard-00002.safetensors")
    with pytest.raises(WeightUpdateError, match=words):
        validate(manifest)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors[1:], "t0 was not expected"),
        (lambda tensors: [("t0", torch.zeros(3)), *tensors[1:]], r"t0 is \(50, 7\)"),
        (lambda tensors: [*tensors, ("more", torch.zeros(3))], "more is missing"),
    ],
)
def test_files_of_other_tensors_than_the_manifests_are_refused(
    tmp_path: Path, change: Callable[[Named], Named], words: str
) -> None:
    tensors = some_tensors()
    DiskSender(tensors, torch.float32, tmp_path / "here").publish(1, tensors)
    changed = change(tensors)
    manifest = DiskSender(changed, torch.float32, tmp_path / "there").publish(1, changed)
    manifest = replace(manifest, path=str(tmp_path / "here" / "version-1"))
    with pytest.raises(WeightUpdateError, match=words):
        validate(manifest)


def test_tensors_that_changed_leave_no_files_and_are_taken_to_their_end(tmp_path: Path) -> None:
    tensors = some_tensors()
    sender = DiskSender(tensors, torch.float32, tmp_path, 4000)
    source = iter([*tensors[:6], *tensors[7:]])
    with pytest.raises(WeightUpdateError, match="got t7 instead of t6"):
        sender.publish(1, source)
    assert next(source, None) is None
    assert os.listdir(tmp_path) == []


def write_on_a_small_disk(folder: str, told: Any) -> None:
    """In a process of its own, none of whose files may be larger than 20 kB."""
    tensors = some_tensors()
    small = DiskSender(tensors, torch.float32, folder, shard_bytes=4000)
    whole = small.publish(1, tensors)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    taken: list[str] = []

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            taken.append(name)
            yield name, tensor

    try:
        DiskSender(tensors, torch.float32, folder).publish(2, counted())
    except WeightUpdateError as error:
        validate(whole)
        told.put((str(error), len(taken) == len(tensors)))


def test_a_full_disk_is_one_sentence_and_the_last_whole_version_stays(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    child = context.Process(target=write_on_a_small_disk, args=(str(tmp_path), told))
    child.start()
    message, drained = told.get(timeout=60)
    child.join()
    assert message == f"version 2 cannot be written to {tmp_path}: File too large"
    assert drained
    assert os.listdir(tmp_path) == ["version-1"]


def test_what_a_trainer_left_half_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / "version-9.tmp").mkdir()
    (tmp_path / "version-9.tmp" / "shard-00001.safetensors").touch()
    DiskSender(some_tensors(), torch.float32, tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_to_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"weights\.folder: .*file/weights cannot be written to"):
        DiskSender(some_tensors(), torch.float32, tmp_path / "file" / "weights")
    with pytest.raises(InputError, match=r"disk needs weights\.folder"):
        DiskSender(some_tensors(), torch.float32, "")
