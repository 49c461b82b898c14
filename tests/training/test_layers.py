"""Activation checkpointing with a choice of layers."""

import copy
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.training.test_gather import SMALL
from turnwise.training.loading import decoder_layers, recompute

LAYERS = 5


def gradients(every: bool | int) -> tuple[list[int], list[torch.Tensor]]:
    """Return how often each layer computed its attention, forward and backward, and the weights'
    gradients."""
    torch.manual_seed(0)
    shape = Qwen3Config(**{**SMALL, "num_hidden_layers": LAYERS})
    model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(shape)).float().eval()
    calls = Counter[int]()
    for number, layer in enumerate(decoder_layers(model)):
        layer.self_attn.register_forward_pre_hook(partial(count, calls, number))
    recompute(model, every)
    ids = torch.arange(24).view(2, 12)
    model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[..., 0].sum().backward()
    return [calls[number] for number in range(LAYERS)], [p.grad for p in model.parameters()]


def count(calls: Counter[int], number: int, *_: object) -> None:
    calls[number] += 1


@pytest.mark.parametrize(
    ("every", "computed"),
    [(True, [2] * LAYERS), (1, [2] * LAYERS), (2, [2, 1, 2, 1, 2]), (3, [2, 1, 1, 2, 1])],
)
def test_chosen_layers_are_computed_twice_for_equal_gradients(
    every: bool | int, computed: list[int]
) -> None:
    once, expected = gradients(False)
    assert once == [1] * LAYERS
    times, found = gradients(every)
    assert times == computed
    for gradient, one in zip(found, expected, strict=True):
        assert torch.equal(gradient, one)
