"""Versions as files: whole or not at all."""

import multiprocessing
import os
import re
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.weights.links import CPU, assert_same, some_tensors
from tests.weights.trainer import Named
from turnwise.errors import InputError, WeightUpdateError
from turnwise.weights.disk import DiskSender, DiskTransport, load
from turnwise.weights.manifest import Manifest
from turnwise.weights.transport import ReceiverOptions


def validate(manifest: Manifest) -> None:
    DiskTransport().validate(manifest, ReceiverOptions(CPU, 0))


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


def versions(folder: Path) -> list[str]:
    """Names of the versions of all senders in a folder."""
    return sorted(path.name for path in folder.glob("*/version-*"))


def test_the_last_two_versions_are_kept_whatever_their_numbers(tmp_path: Path) -> None:
    tensors = some_tensors()
    sender = DiskSender(tensors, torch.float32, tmp_path)
    manifests = {version: sender.publish(version, tensors) for version in (7, 8, 2, 3, 3)}
    assert versions(tmp_path) == ["version-2", "version-3"]
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
    here = DiskSender(tensors, torch.float32, tmp_path / "here").publish(1, tensors)
    changed = change(tensors)
    manifest = DiskSender(changed, torch.float32, tmp_path / "there").publish(1, changed)
    manifest = replace(manifest, path=here.path)
    with pytest.raises(WeightUpdateError, match=words):
        validate(manifest)


def test_changed_tensors_leave_no_files_and_are_read_to_the_end(tmp_path: Path) -> None:
    tensors = some_tensors()
    sender = DiskSender(tensors, torch.float32, tmp_path, 4000)
    source = iter([*tensors[:6], *tensors[7:]])
    with pytest.raises(WeightUpdateError, match="got t7 instead of t6"):
        sender.publish(1, source)
    assert next(source, None) is None
    assert versions(tmp_path) == []


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


def test_a_full_disk_is_one_sentence_and_keeps_the_last_version(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    child = context.Process(target=write_on_a_small_disk, args=(str(tmp_path), told))
    child.start()
    message, drained = told.get(timeout=60)
    child.join()
    assert re.fullmatch(
        rf"version 2 cannot be written to {tmp_path}/[0-9a-f]{{8}}: File too large", message
    )
    assert drained
    assert versions(tmp_path) == ["version-1"]


def test_two_runs_with_one_folder_never_see_each_others_weights(tmp_path: Path) -> None:
    here, there = ({"w": torch.full((4,), value)} for value in (1.0, 2.0))
    one = DiskSender(here.items(), torch.float32, tmp_path)
    two = DiskSender(there.items(), torch.float32, tmp_path)
    mine = one.publish(1, here.items())
    for version in range(1, 5):
        two.publish(version, there.items())
    DiskSender(there.items(), torch.float32, tmp_path)  # a third one starts
    validate(mine)
    assert dict(load(mine))["w"].tolist() == [1.0] * 4
    two.close()
    one.close()
    assert versions(tmp_path) == []


def publish_and_die(folder: str) -> None:
    tensors = some_tensors()
    DiskSender(tensors, torch.float32, folder).publish(1, tensors)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_sender_removes_what_a_dead_one_left_on_its_machine(tmp_path: Path) -> None:
    def leave_one() -> None:
        child = multiprocessing.get_context("fork").Process(
            target=publish_and_die, args=(str(tmp_path),)
        )
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL

    leave_one()
    (elsewhere,) = tmp_path.iterdir()
    (elsewhere / "owner.lock").write_text("another machine, whose locks are not seen here")
    leave_one()
    (tmp_path / "version-9.tmp").mkdir()  # nobody's
    assert len(versions(tmp_path)) == 2
    sender = DiskSender(some_tensors(), torch.float32, tmp_path)
    assert {*tmp_path.iterdir()} == {elsewhere, tmp_path / "version-9.tmp", sender._folder}
    sender.close()
    assert {*tmp_path.iterdir()} == {elsewhere, tmp_path / "version-9.tmp"}


def test_a_folder_that_cannot_be_written_to_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"weights\.folder: .*file/weights cannot be written to"):
        DiskSender(some_tensors(), torch.float32, tmp_path / "file" / "weights")
    with pytest.raises(InputError, match=r"disk needs weights\.folder"):
        DiskSender(some_tensors(), torch.float32, "")
