"""The packing of a layer's weights on a CPU: in threads during an update, and otherwise at once."""

import pytest
import torch

from turnwise.internals import vllm_cpu
from turnwise.internals.vllm_cpu import PackingThreads

ops = vllm_cpu._custom_ops
pytestmark = pytest.mark.skipif(
    not vllm_cpu.current_platform.is_cpu(), reason="only CPUs pack weights"
)


def products(handles: list[object], inputs: torch.Tensor) -> list[torch.Tensor]:
    return [ops.onednn_mm(handle, inputs, None) for handle in handles]


def test_weights_packed_in_threads_equal_those_packed_at_once() -> None:
    assert ops.create_onednn_mm == vllm_cpu.packing.create
    packing, inputs = PackingThreads(), torch.rand(7, 64)
    weights = [torch.rand(96, 64) for _ in range(20)]
    at_once = [packing.create(weight.t(), 32) for weight in weights]
    packing.loading = True
    later = [packing.create(weight.t(), 32) for weight in weights]
    packing.finish()
    for one, other, weight in zip(
        products(at_once, inputs), products(later, inputs), weights, strict=True
    ):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, inputs @ weight.t())


def test_a_weight_that_cannot_be_packed_fails_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(weight: torch.Tensor, *cache_size: int) -> None:
        raise RuntimeError("there is no memory")

    packing = PackingThreads()
    packing.loading = True
    with monkeypatch.context() as patched:
        patched.setattr(vllm_cpu, "_pack", refuse)
        packing.create(torch.rand(96, 64).t(), 32)
        with pytest.raises(RuntimeError, match="there is no memory"):
            packing.finish()
    handle = packing.create(torch.rand(96, 64).t(), 32)
    assert handle.handler_tensor is not None


@pytest.mark.parametrize("is_head", [True, False])
def test_embeddings_are_packed_if_logits_are_computed_with_them(
    is_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[torch.Tensor] = []

    def note(weight: torch.Tensor, *cache_size: int) -> object:
        packed.append(weight)
        return vllm_cpu.packing.create(weight, *cache_size)

    monkeypatch.setattr(ops, "create_onednn_mm", note)
    layer = torch.nn.Module()
    if is_head:
        layer = vllm_cpu.ParallelLMHead.__new__(vllm_cpu.ParallelLMHead)
        torch.nn.Module.__init__(layer)
    method = vllm_cpu.vocab_parallel_embedding.UnquantizedEmbeddingMethod()
    layer.weight = torch.nn.Parameter(torch.rand(96, 64), requires_grad=False)
    for version in (1, 2):
        packed.clear()
        method.process_weights_after_loading(layer)
        assert len(packed) == int(is_head)
        if not is_head:
            layer.weight.add_(version)  # vLLM puts the new weights into the old memory afterwards
        inputs = torch.rand(7, 64)
        for _ in range(2):
            logits = method.apply(layer, inputs)
            torch.testing.assert_close(logits, inputs @ layer.weight.t())
        assert len(packed) == 1
