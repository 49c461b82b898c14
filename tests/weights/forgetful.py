"""A worker that reports an adapter as loaded, and computes without it."""

from turnwise.core.json_types import JsonObject
from turnwise.weights.vllm_worker import WorkerExtension


class Forgetful(WorkerExtension):
    def load_adapter(self, number: int, config: JsonObject) -> JsonObject:
        reply = super().load_adapter(number, config)
        slots = self.model_runner.lora_manager._adapter_manager
        for module in slots.modules.values():
            module.reset_lora(slots.lora_index_to_id.index(number))
        return reply
