"""A worker that reports an adapter as loaded, and computes without it."""

from turnwise.core.json_types import JsonObject
from turnwise.weights.vllm_worker import WorkerExtension


class Forgetful(WorkerExtension):
    def load_update(self, number: int = 0, config: JsonObject | None = None) -> JsonObject:
        reply = super().load_update(number, config)
        slots = self.model_runner.lora_manager._adapter_manager
        for module in slots.modules.values():
            module.reset_lora(slots.lora_index_to_id.index(number))
        return reply
