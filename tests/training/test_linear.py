"""Linear layers by oneDNN: torch's values and gradients."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from turnwise.internals.torch import HAS_ONEDNN
from turnwise.training import linear
from turnwise.training.linear import use_onednn

pytestmark = pytest.mark.skipif(not HAS_ONEDNN, reason="torch has no oneDNN here")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let oneDNN multiply the small matrices of these tests."""
    monkeypatch.setattr(linear, "_SMALLEST", 1)


def results(layer: nn.Linear, inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return a layer's outputs and all gradients."""
    inputs = inputs.detach().requires_grad_()
    layer.zero_grad()
    made = layer(inputs)
    torch.manual_seed(1)
    (made * torch.randn(made.shape)).sum().backward()
    gradients = [each.grad for each in (inputs, *layer.parameters()) if each.requires_grad]
    return [made.detach(), *(each for each in gradients if each is not None)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("largest", [2**24, 10])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(5, 24),
        lambda: torch.randn(2, 3, 24),
        lambda: torch.randn(24, 7).T,
        lambda: torch.randn(2, 7, 48)[:, :, ::2],
    ],
)
def test_layers_compute_what_torch_computes(
    make: Callable[[], torch.Tensor], bias: bool, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_COPIED", largest)
    torch.manual_seed(0)
    plain, inputs = nn.Linear(24, 40, bias=bias), make()
    own = copy.deepcopy(plain)
    use_onednn(own, CPU)
    assert type(own) is not nn.Linear
    expected, found = results(plain, inputs), results(own, inputs)
    assert len(found) == len(expected) == 3 + bias
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_layer_that_does_not_learn_keeps_no_inputs() -> None:
    layer = nn.Linear(8, 8, bias=False).requires_grad_(False)
    use_onednn(layer, CPU)
    inputs = torch.randn(4, 8, requires_grad=True)
    kept = layer(inputs).grad_fn.saved_tensors
    assert [each for each in kept if each is not None] == [layer.weight]


def test_other_types_and_empty_inputs_are_torchs() -> None:
    layer = nn.Linear(8, 4)
    use_onednn(layer, CPU)
    assert layer(torch.zeros(0, 8)).shape == (0, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(3, 8)).dtype == torch.bfloat16
    half = nn.Linear(8, 4, dtype=torch.bfloat16)
    use_onednn(half, CPU)
    assert half(torch.randn(3, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_small_layers_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_SMALLEST", 50)
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(8, 8))
    use_onednn(model, CPU)
    assert [type(layer) is nn.Linear for layer in model] == [True, False]
