"""A worker that reports an adapter as loaded, and computes without it."""

from collections.abc import Mapping

from turnwise.core.json_types import JsonObject
from turnwise.weights.vllm_worker import WorkerExtension


class Forgetful(WorkerExtension):
    def load_update(
        self, numbers: Mapping[str, int] | None = None, config: JsonObject | None = None
    ) -> JsonObject:
        reply = super().load_update(numbers, config)
        assert numbers is not None
        slots = self.model_runner.lora_manager._adapter_manager
        for module in slots.modules.values():
            for number in numbers.values():
                module.reset_lora(slots.lora_index_to_id.index(number))
        return reply
