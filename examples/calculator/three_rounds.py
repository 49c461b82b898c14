"""A conversation of three rounds with callbacks: a question and two follow-ups.

Each round names the previous round's completion (`x-request-id`), so its prompt begins with the
previous round's exact tokens. As a program, with the model of `make demo`:

    python -m examples.calculator.three_rounds

As the conversation of each trajectory, trained with the environment's reward:

    turnwise train examples/calculator/config.yaml rollout.loop=chat_scheduler \
        rollout.chat_scheduler=examples.calculator.three_rounds:ThreeRounds
"""

import sys
from pathlib import Path
from typing import Any

from turnwise.compat.verl import ChatCompletionScheduler, DataProto, LLMServerManager

CONFIG = Path(__file__).parent / "config.yaml"
FOLLOW_UPS = ("Check it.", "What is the answer, then?")


async def on_completion(
    scheduler: ChatCompletionScheduler,
    completions: Any,
    info: dict[str, Any],
    exception: Exception | None,
) -> None:
    """Append the answer, and submit the next round until there is none."""
    if exception is not None:
        raise exception
    messages, round_number = info["messages"], info["round"]
    message = completions.choices[0].message
    messages.append({"role": message.role, "content": message.content})
    if round_number == len(FOLLOW_UPS):
        return
    messages.append({"role": "user", "content": FOLLOW_UPS[round_number]})

    async def callback(*answer: Any) -> None:
        await on_completion(scheduler, *answer)

    await scheduler.submit_chat_completions(
        callback=callback,
        callback_additional_info={"messages": messages, "round": round_number + 1},
        model=scheduler.model_name,
        messages=messages,
        extra_headers={"x-request-id": completions.id},
    )


class ThreeRounds(ChatCompletionScheduler):
    """The conversation as a class for `rollout.chat_scheduler`."""

    async def generate_sequences(self, batch: DataProto, **sampling_params: Any) -> None:
        async def callback(*answer: Any) -> None:
            await on_completion(self, *answer)

        for conversation in batch.non_tensor_batch["raw_prompt"]:
            messages = conversation.tolist()
            await self.submit_chat_completions(
                callback=callback,
                callback_additional_info={"messages": messages, "round": 0},
                model=self.model_name,
                messages=messages,
                **sampling_params,
            )


def main(overrides: list[str]) -> None:
    """Hold one conversation with explicit calls, and then a batch of them."""
    overrides = [
        "rollout.loop=chat_scheduler",
        f"rollout.chat_scheduler={__spec__.name}:ThreeRounds",
        *overrides,
    ]
    with LLMServerManager(CONFIG, overrides) as manager:
        manager.sleep()
        manager.wake_up()
        for address in manager.server_addresses:
            sys.stdout.write(f"a worker serves http://{address}/v1\n")
        scheduler = manager.chat_scheduler

        async def callback(*answer: Any) -> None:
            await on_completion(scheduler, *answer)

        messages: list[dict[str, Any]] = [{"role": "user", "content": "What is 12 plus 30?"}]
        manager.submit_chat_completions(
            callback=callback,
            callback_additional_info={"messages": messages, "round": 0},
            model=scheduler.model_name,
            messages=messages,
        )
        for message in messages:
            sys.stdout.write(f"{message['role']}: {message['content']}\n")
        questions = ("What is 3 times 4?", "What is 9 minus 5?")
        made = manager.generate_sequences(
            [[{"role": "user", "content": question}] for question in questions], n=2
        )
        assert made.batch is not None
        for name, tensor in made.batch.items():
            sys.stdout.write(f"{name}: {list(tensor.shape)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
