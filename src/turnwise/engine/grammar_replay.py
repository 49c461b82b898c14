"""The ids that a grammar allowed at each token of a completion.

vLLM's sampler does not return the allowed ids, so they are computed again. The ids that a grammar
allows at a token depend only on the ids before it. So once a completion has ended, its ids are
replayed through a second grammar manager, configured like the engine's.
"""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from turnwise.engine.protocol import Request
from turnwise.errors import EngineError
from turnwise.trajectory import pack_allowed

if TYPE_CHECKING:
    from turnwise.internals import vllm


class GrammarReplay:
    """The grammars of one engine; it replays one completion at a time."""

    def __init__(self, llm: "vllm.AsyncLLM") -> None:
        self._config = llm.vllm_config
        self._processor = llm.input_processor
        self._manager: vllm.StructuredOutputManager | None = None
        self._lock = threading.Lock()

    def allowed(
        self,
        asked: Request,
        params: "vllm.SamplingParams",
        token_ids: Sequence[int],
        tasks: "tuple[vllm.SupportedTask, ...]",
    ) -> list[bytes]:
        """Return `Turn.allowed` of a completion. Call this in a thread, because it takes some
        milliseconds.

        Args:
            tasks: vLLM's tasks that the engine's model supports.

        Raises:
            EngineError: when the grammar does not allow one of the ids.
        """
        from turnwise.internals import vllm  # seconds to import

        inputs = vllm.tokens_input(asked.prompt.tolist())
        made = self._processor.process_inputs(
            asked.id, inputs, params.clone(), supported_tasks=tasks
        )
        packed: dict[bytes, bytes] = {}
        sets: list[bytes] = []
        with self._lock:
            if self._manager is None:
                self._manager = vllm.StructuredOutputManager(self._config)
            found = vllm.allowed_bits(self._manager, made, token_ids)
            for token, bits in zip(token_ids, found, strict=False):  # empty without a grammar
                if not bits[token // 8] >> token % 8 & 1:
                    raise EngineError(
                        f"{asked.id} sampled the id {token}, which its grammar does not allow: "
                        "the engine has another backend of grammars "
                        "(engine.vllm_args.structured_outputs_config)"
                    )
                if bits not in packed:
                    packed[bits] = pack_allowed(bits)
                sets.append(packed[bits])
        return sets

    def close(self) -> None:
        if self._manager is not None:
            self._manager.clear_backend()
