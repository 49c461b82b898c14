"""A policy with the bodies that ChatLearn's page about vLLM describes, as a user writes it."""

from typing import Any

from turnwise.compat.chatlearn import VLLMModule, VLLMPromptPipeline, get_model, print_rank_0


class PagePolicy(VLLMModule):
    """Its `forward_step` is that of a scheduler's batch."""

    def setup(self) -> None:
        self.model = get_model(self.model_provider, self.model_args)
        self.batches: list[int] = []

    def model_provider(self) -> Any:
        print_rank_0(f"the model of {self.model_args.get('seq_length')} tokens")
        return self.model_args.get("load")

    def build_dataset(self, train_prompts: Any, is_eval: bool = False) -> Any:
        longest = self.model_args.get("seq_length") - self.model_args.get("max_new_tokens")
        return VLLMPromptPipeline(train_prompts, longest, self.tokenizer.tokenizer)

    def _add_request(self, data: Any, is_eval: bool = False) -> Any:
        return self._add_request_internal(data["prompt"], data["input_ids"], is_eval=is_eval)

    def _forward_step(self, data: Any, iteration: int, eval_mode: bool) -> Any:
        assert iteration >= 0
        assert isinstance(eval_mode, bool)
        metadata = data["seq_group_metadata_list"]
        swapped = data["blocks_to_swap_in"], data["blocks_to_swap_out"]
        self.batches.append(len(data["input_ids"]))
        return self.execute_step(metadata, *swapped, data["blocks_to_copy"])

    def forward_step(self, data: Any, iteration: int = 0) -> Any:
        return self._forward_step(data, iteration, eval_mode=False)

    def eval_forward(self, data: Any, iteration: int = 0) -> Any:
        return self._forward_step(data, iteration, eval_mode=True)

    def decode_internal(self, batched_outputs: Any) -> dict[str, Any]:
        answers = [(output, done) for output in batched_outputs for done in output.outputs]
        return {
            "str_prompts": [output.prompt for output, _ in answers],
            "str_outputs": [done.text for _, done in answers],
            "all_tokens": [
                output.prompt_token_ids + list(done.token_ids) for output, done in answers
            ],
            "rewards": [float(sum(done.token_ids) % 2) for _, done in answers],
        }
