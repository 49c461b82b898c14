"""Another loss in the place of stable_reinforce, where the server was started so."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.tinker.bench import Client, logprobs_of, loss_of, opened
from turnwise.config import Config
from turnwise.errors import InputError
from turnwise.tinker.backend import open_tinker
from turnwise.tinker.losses import STAND_INS

IDS = [5, 6, 7, 8]


@pytest.fixture
async def client(config: Config, tmp_path: Path) -> AsyncIterator[Client]:
    async with opened(config, tmp_path, "ppo") as (client, _):
        yield client


def datum(**more: Any) -> dict[str, Any]:
    inputs = {"logprobs": [0.0, -5.0, -6.0], "advantages": [0.0, 1.0, -1.0]}
    return {"tokens": IDS[:-1], "target_tokens": IDS[1:], **inputs, **more}


async def test_the_loss_in_its_place_is_computed_with_its_defaults(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    await client.open()
    own = await client.trained(1, [datum()], "ppo")
    for seq in (2, 3):  # with an input that only the other loss has
        other = await client.trained(seq, [datum(mask=[0.0, 1.0, 1.0])], "stable_reinforce")
        assert loss_of(other) == pytest.approx(loss_of(own), rel=1e-6)
    assert [len(each) for each in logprobs_of(other)] == [3]
    assert [each.message.partition(": ")[2] for each in caplog.records] == [
        "stable_reinforce is computed as ppo, its settings and provenance are not used"
    ]
    assert (await client.step(4, learning_rate=1e-2))["metrics"]["grad_norm"] > 0


async def test_samples_for_it_are_taken_and_their_program_learns_of_it(client: Client) -> None:
    session = await client.tree("create_session", {})
    assert "stable_reinforce is computed as ppo" in session["info_message"]
    body = {"session_id": session["session_id"], "sampling_session_seq_id": 0}
    made = await client.tree("create_sampling_session", body | {"base_model": "model"})
    body = {"sampling_session_id": made["sampling_session_id"], "seq_id": 0}
    body |= {"prompt": {"chunks": [{"tokens": IDS}]}, "sampling_params": {"max_tokens": 4}}
    promise = await client.tree("asample", body | {"record_stability_info": True})
    assert len(promise["sample_sequence_ids"]) == 1  # by which data say where tokens are from
    assert isinstance(await client.result(promise), bytes)


async def test_a_loss_that_needs_other_inputs_cannot_be_in_its_place(config: Config) -> None:
    assert STAND_INS == ["importance_sampling", "ppo", "cispo"]
    with pytest.raises(InputError, match="it may be importance_sampling, ppo, cispo"):
        async with open_tinker(config, stable="gspo"):
            pass
