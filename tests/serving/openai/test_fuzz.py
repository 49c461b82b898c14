"""Whatever is sent to the server, it answers, and never with a 500."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.simulated import Latency, SimulatedEngine
from turnwise.config import Config
from turnwise.engine.protocol import Engine
from turnwise.serving.openai.server import OpenAIServer
from turnwise.serving.worker_handle import WorkerHandle

QUICK = Latency(prefill_token=0.0, step=1e-4, step_request=0.0)


@pytest.mark.slow
async def test_schemathesis_finds_no_500_and_no_hang(
    make_config: Callable[..., Config], tokenizer: Any, tmp_path: Path
) -> None:
    engine = SimulatedEngine(vocab_size=len(tokenizer), latency=QUICK)
    await check_with_schemathesis(make_config(serving={"port": 0}), engine, tmp_path, examples=20)


@pytest.mark.slow
async def test_schemathesis_finds_no_500_before_a_real_engine(
    engine: WorkerHandle, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    await check_with_schemathesis(make_config(serving={"port": 0}), engine, tmp_path, examples=8)


async def check_with_schemathesis(
    config: Config, engine: Engine, folder: Path, examples: int
) -> None:
    """Send generated requests to a server before `engine`: it answers, and stays well."""
    server = OpenAIServer(config, engine)
    root = (await server.start()).removesuffix("/v1")
    try:
        fuzzer = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{root}/openapi.json"),
            *("--checks", "not_a_server_error", "--request-timeout", "240"),
            *("--phases", "fuzzing", "--max-examples", str(examples), "--seed", "1"),
            *("--suppress-health-check", "all", "--continue-on-failure", "--no-color"),
            cwd=folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await fuzzer.communicate()
        text = said.decode(errors="replace")
        assert fuzzer.returncode == 0, text[-12_000:]
        assert "generated" in text
        async with httpx.AsyncClient(base_url=root, timeout=60) as http:
            assert (await http.get("/health")).status_code == 200
            served = (await http.get("/metrics")).text
        assert 'turnwise_requests_total{what="200"}' in served
        assert 'what="500"' not in served
        async with asyncio.timeout(60):  # a client may leave before its answer ends
            while await engine.num_in_flight():
                await asyncio.sleep(0.01)
        await engine.check_health()
    finally:
        await server.stop()
