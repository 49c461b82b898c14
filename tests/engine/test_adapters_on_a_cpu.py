"""An engine on a CPU multiplies each token by the matrices of its own adapter."""

import pytest
import torch

from turnwise.internals import vllm_cpu


@pytest.mark.parametrize(
    "adapters",
    [
        [0, 0, 0, 0],
        [2, 0, 1, 0],
        [2, 0, 2, 0],
        [1, 2, 1, 1],
        [-1, 1, -1, 1],
        [-1, -1, -1, -1],
        [2, 0, 1, 0, 0, 0, 0, 0, 0, 0],
        [-1, 0, 1, 0, 0, 0, 0, 0, 0, 0],
    ],
    ids=str,
)
def test_each_token_is_multiplied_by_its_own_adapter(adapters: list[int]) -> None:
    torch.manual_seed(0)
    count = len(adapters)
    shrink, expand = torch.randn(3, 1, 2, 6), torch.randn(3, 1, 5, 2)
    tokens, output, numbers = torch.randn(count, 6), torch.ones(count, 9), torch.tensor(adapters)
    expected = output.clone()
    for row, number in enumerate(adapters):
        if number >= 0:  # else the token has none
            added = expand[number, 0] @ (0.5 * shrink[number, 0] @ tokens[row])
            expected[row, 3:8] += added
    between = torch.zeros(count, 2)
    vllm_cpu.lora_ops.bgmv_shrink(tokens, shrink, between, numbers, 0.5)
    vllm_cpu.lora_ops.bgmv_expand_slice(between, expand, output, numbers, 3, 5, add_inputs=True)
    torch.testing.assert_close(output, expected)
    whole = torch.ones(count, 7)  # which has been padded
    vllm_cpu.punica_cpu.bgmv_expand(between, expand, whole, numbers, add_inputs=False)
    torch.testing.assert_close(whole[:, :5], expected[:, 3:8] - 1)
    assert bool((whole[:, 5:] == 1).all())


def test_a_step_without_tokens_computes_nothing() -> None:
    output = torch.zeros(0, 2)
    numbers = torch.zeros(0, dtype=torch.long)
    vllm_cpu.lora_ops.bgmv_shrink(torch.zeros(0, 6), torch.randn(3, 1, 2, 6), output, numbers, 0.5)
    assert output.shape == (0, 2)
