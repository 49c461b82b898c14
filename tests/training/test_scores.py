"""Scores from last hidden states: the values and gradients of autograd, in less memory."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from turnwise.config import SamplingConfig
from turnwise.training.memory import _LiveBytes
from turnwise.training.model import score_hidden


def head(words: int) -> Any:
    torch.manual_seed(0)
    keys = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=words, num_attention_heads=1, **keys))


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(top_k=3)])
@pytest.mark.parametrize("with_gradient", [False, True])
def test_log_probs_have_the_gradient_of_autograd(
    sampling: SamplingConfig, with_gradient: bool
) -> None:
    """And entropies are the same with a gradient and without."""
    model = head(50)
    hidden_NH = (2 * torch.randn(7, 16)).requires_grad_()
    logits_NV = model.lm_head(hidden_NH)
    targets_N = logits_NV.argmax(-1)
    if sampling.top_k > 0:
        least_N1 = logits_NV.topk(3).values[:, -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < least_N1, float("-inf"))
    expected = torch.distributions.Categorical(logits=logits_NV)
    weights_N = torch.linspace(-1, 1, 7)
    (expected.log_prob(targets_N) * weights_N).sum().backward()
    gradients = [hidden_NH.grad, model.lm_head.weight.grad]
    hidden_NH.grad = model.lm_head.weight.grad = None
    logprobs_N, entropy_N = score_hidden(model, hidden_NH, targets_N, sampling, with_gradient)
    (logprobs_N * weights_N).sum().backward()
    torch.testing.assert_close(logprobs_N, expected.log_prob(targets_N))
    torch.testing.assert_close(entropy_N, expected.entropy(), rtol=1e-5, atol=1e-5)
    assert entropy_N.requires_grad is with_gradient
    for found, gradient in zip((hidden_NH.grad, model.lm_head.weight.grad), gradients, strict=True):
        torch.testing.assert_close(found, gradient)


def test_several_targets_per_position_match_autograd() -> None:
    model = head(50)
    hidden_NH = (2 * torch.randn(7, 16)).requires_grad_()
    targets_NK = torch.randint(50, (7, 3))
    targets_NK[2] = 4  # the same one three times
    weights_NK = torch.linspace(-1, 2, 21).view(7, 3)
    expected_NK = model.lm_head(hidden_NH).log_softmax(-1).gather(-1, targets_NK)
    (expected_NK * weights_NK).sum().backward()
    expected, hidden_NH.grad = hidden_NH.grad, None
    logprobs_NK, entropy_N = score_hidden(model, hidden_NH, targets_NK, SamplingConfig())
    (logprobs_NK * weights_NK).sum().backward()
    torch.testing.assert_close(logprobs_NK, expected_NK)
    torch.testing.assert_close(hidden_NH.grad, expected)
    assert entropy_N.shape == (7,)


def test_scores_hold_two_tensors_of_the_size_of_the_logits() -> None:
    model, rows, words = head(8192), 256, 8192
    hidden_NH = torch.randn(rows, 16, requires_grad=True)
    targets_N = torch.randint(words, (rows,))
    with _LiveBytes(model) as live:
        score_hidden(model, hidden_NH, targets_N, SamplingConfig())[0].sum().backward()
    assert 2 <= live.peak / (4 * rows * words) < 2.2
