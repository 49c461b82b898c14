"""Structured outputs of a model that reasons first."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from turnwise.config import Config
from turnwise.serving.openai.server import OpenAIServer
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.trajectory import ChatTemplate


@pytest.mark.slow
async def test_a_grammar_begins_where_the_reasoning_ends(
    ray_started: None, make_config: Callable[..., Config], template: ChatTemplate
) -> None:
    config = make_config(serving={"port": 0, "reasoning_parser": "qwen3"})
    engine = await WorkerHandle.start(config, name="reasoning")
    server = OpenAIServer(config, engine)
    try:
        async with httpx.AsyncClient(base_url=await server.start(), timeout=60) as http:
            asked: dict[str, Any] = {
                "messages": [{"role": "user", "content": "What is 12 plus 30?"}],
                **{"temperature": 0, "max_tokens": 60},
                "structured_outputs": {"choice": ["Alpha", "Beta"]},
                "vllm_xargs": {"script": template.encode("<think>12 and 30</think>")},
            }
            message = (await http.post("/chat/completions", json=asked)).json()["choices"][0]
            assert message["message"]["reasoning"] == "12 and 30"
            assert message["message"]["content"].strip() in ("Alpha", "Beta")
            assert message["finish_reason"] == "stop"
    finally:
        await server.stop()
        await engine.shutdown()
