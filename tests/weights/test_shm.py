"""Shared memory: buffers that a worker keeps mapped, and no longer than their trainer lives."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from turnwise.weights import shm
from turnwise.weights.manifest import Manifest
from turnwise.weights.shm import ShmSender, load

TRAINER = """
import json, sys
import torch
from turnwise.weights.shm import ShmSender

sender = ShmSender([("weight", torch.empty(1000))])
for version in map(int, sys.stdin):
    manifest = sender.publish(version, [("weight", torch.full((1000,), float(version)))])
    print(json.dumps(manifest.to_dict()), flush=True)
"""


@pytest.fixture
def trainer() -> Iterator[subprocess.Popen[str]]:
    shm._mapped.clear()
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    yield process
    process.kill()
    process.communicate()
    shm._mapped.clear()


def published(trainer: subprocess.Popen[str], version: int) -> torch.Tensor:
    """Let the trainer publish a version; return its tensor."""
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    print(version, file=trainer.stdin, flush=True)
    ((name, tensor),) = load(Manifest.from_dict(json.loads(trainer.stdout.readline())))
    assert name == "weight"
    assert tensor.tolist() == [version] * 1000
    return tensor


def test_a_worker_maps_each_buffer_once(trainer: subprocess.Popen[str]) -> None:
    places = [published(trainer, version).data_ptr() for version in range(6)]
    assert len(set(places)) == 2
    assert places[::2] == places[:1] * 3
    assert places[1::2] == places[1:2] * 3


def test_the_buffers_of_a_trainer_that_ended_are_freed(trainer: subprocess.Popen[str]) -> None:
    def mappings() -> set[str]:
        with open(f"/proc/{os.getpid()}/maps") as lines:
            return {line for line in lines if "/dev/shm/turnwise-" in line} - others

    others: set[str] = set()  # of earlier tests
    others = mappings()
    for version in range(2):
        published(trainer, version)
    assert len(mappings()) == 2
    trainer.kill()
    end = time.monotonic() + 60
    while shm._mapped and time.monotonic() < end:
        time.sleep(0.01)
    assert not mappings()


def test_the_buffers_of_an_earlier_sender_are_freed(trainer: subprocess.Popen[str]) -> None:
    for version in range(2):
        published(trainer, version)
    own = ShmSender([("weight", torch.empty(10))])
    senders = [own, ShmSender([("weight", torch.empty(10))])]
    for sender in senders:
        for version in range(2):
            tensors = [("weight", torch.full((10,), float(version)))]
            manifest = sender.publish(version, tensors)
            assert [tensor.tolist() for _, tensor in load(manifest)] == [[version] * 10]
            assert len(shm._mapped) <= 2
            assert manifest.path in shm._mapped
        sender.close()
    assert len(shm._mapped) == 2
