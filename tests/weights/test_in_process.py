"""Tensors handed over inside one process."""

from collections.abc import Iterator

import pytest
import torch

from turnwise.errors import WeightUpdateError
from turnwise.weights.in_process import InProcessSender, published
from turnwise.weights.manifest import Manifest


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Linear(3, 2)


@pytest.fixture
def sender() -> Iterator[InProcessSender]:
    sender = InProcessSender()
    yield sender
    sender.close()


def test_what_is_published_is_the_trainers_memory_itself(
    model: torch.nn.Module, sender: InProcessSender
) -> None:
    manifest = sender.publish(3, model.named_parameters())
    assert Manifest.from_dict(manifest.to_dict()) == manifest
    assert (manifest.version, manifest.transport, manifest.nbytes) == (3, "in_process", 4 * (6 + 2))
    assert [(t.name, t.dtype, t.shape) for t in manifest.tensors] == [
        ("weight", "float32", (2, 3)),
        ("bias", "float32", (2,)),
    ]
    tensors = published(3)
    for name, parameter in model.named_parameters():
        assert tensors[name].data_ptr() == parameter.data_ptr()
        assert not tensors[name].requires_grad


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_an_optimizer_step_ends_a_publication(
    model: torch.nn.Module, sender: InProcessSender, name: str
) -> None:
    optimizer = getattr(torch.optim, name)(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    sender.publish(3, model.named_parameters())
    published(3)
    optimizer.step()
    with pytest.raises(WeightUpdateError, match="weight has changed since version 3"):
        published(3)
    sender.publish(4, model.named_parameters())
    published(4)


def test_only_the_last_version_is_published(
    model: torch.nn.Module, sender: InProcessSender
) -> None:
    with pytest.raises(WeightUpdateError, match="version 3 is not published"):
        published(3)
    sender.publish(3, model.named_parameters())
    sender.publish(4, model.named_parameters())
    with pytest.raises(WeightUpdateError, match="version 3 is not published"):
        published(3)
    sender.close()
    with pytest.raises(WeightUpdateError, match="version 4 is not published"):
        published(4)
