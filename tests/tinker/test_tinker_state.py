"""States that clients save, and those that a killed server leaves; without engines: see `bench`."""

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tinker.bench import KEY, Client, loss_of, opened
from turnwise.config import Config
from turnwise.engine.protocol import Completion
from turnwise.errors import InputError, TurnwiseError
from turnwise.tinker.backend import _alone_in
from turnwise.tinker.checkpoints import Checkpoint, Checkpoints
from turnwise.tinker.run_log import SampleIndex
from turnwise.tinker.service import TinkerService
from turnwise.tinker.wire import message_classes
from turnwise.trajectory import Prompt, audit, read_jsonl
from turnwise.viewer.run_files import ViewedRun

IDS = [5, 6, 7, 8, 9, 10]
SUPERVISED = {"tokens": IDS[:-1], "target_tokens": IDS[1:], "weights": [1.0] * 5}
OTHER = {"X-API-Key": "tml-two"}


async def save(client: Client, seq: int, name: str, verb: str = "save_weights", **more: Any) -> Any:
    body = {"model_id": client.model, "seq_id": seq, "path": name} | more
    return await client.result(await client.tree(verb, body))


async def load(client: Client, path: str, number: int = 1, **more: Any) -> Any:
    """Make a model of a saved state; it becomes the client's."""
    body = {"session_id": client.session, "model_seq_id": number, "path": path, "optimizer": True}
    promise = await client.tree("load_weights", body | more)
    client.model = promise["model_id"]
    return await client.result(promise)


async def train(client: Client, first: int, steps: int) -> list[float]:
    """Take optimizer steps; return the loss before each."""
    losses = []
    for seq in range(first, first + 2 * steps, 2):
        losses.append(loss_of(await client.trained(seq, [SUPERVISED], "cross_entropy")))
        await client.step(seq + 1, learning_rate=1e-2)
    return losses


async def get(client: Client, path: str, **query: Any) -> Any:
    answer = await client.http.get(f"/api/v1/{path}", headers=KEY, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def sampled(client: Client, sampler: str, seq: int, prompt: list[int] = IDS) -> list[Any]:
    body = {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
        "sampling_params": {"max_tokens": 6, "seed": seq},
    }
    read = message_classes()["SampleResponse"]()
    read.ParseFromString(await client.result(await client.tree("asample", body)))
    return [
        (np.frombuffer(s.tokens, np.int32).tolist(), np.frombuffer(s.logprobs, np.float32).tolist())
        for s in read.sequences
    ]


def reinforced(prompt: list[int], sample: Any, advantage: float) -> dict[str, Any]:
    """Return a datum of a sample, as the cookbook's loops make it."""
    ids, known = prompt + sample[0], len(prompt) - 1
    return {
        "tokens": ids[:-1],
        "target_tokens": ids[1:],
        "logprobs": [0.0] * known + sample[1],
        "advantages": [0.0] * known + [advantage] * len(sample[0]),
    }


async def snapshot(client: Client, seq: int, number: int) -> str:
    body = {"model_id": client.model, "seq_id": seq, "sampling_session_seq_id": number}
    made = await client.result(await client.tree("save_weights_for_sampler", body))
    name: str = made["sampling_session_id"]
    return name


async def test_a_model_of_a_saved_state_goes_on_bit_for_bit(client: Client) -> None:
    await client.open()
    await train(client, 1, 3)
    path = (await save(client, 7, "third"))["path"]
    assert path == f"tinker://{client.model}/weights/third"
    expected = await train(client, 8, 3)
    assert (await load(client, path))["path"] == path
    assert await train(client, 1, 3) == expected
    await load(client, path, 2, optimizer=False)  # the first moments are missing
    fresh = await train(client, 1, 3)
    assert fresh[0] == expected[0]
    assert fresh[1:] != expected[1:]
    info = await client.tree("weights_info", {"tinker_path": path})
    assert (info["lora_rank"], info["train_mlp"], info["train_unembed"]) == (4, True, False)


async def test_a_state_is_loaded_into_a_model_that_exists_if_it_fits(client: Client) -> None:
    await client.open()
    first = (await train(client, 1, 2))[0]
    path = (await save(client, 5, "second"))["path"]
    expected = await train(client, 6, 1)
    await client.trained(8, [SUPERVISED], "cross_entropy")  # a gradient that is dropped
    body = {"model_id": client.model, "seq_id": 9, "path": path, "optimizer": True}
    await client.result(await client.tree("load_weights", body))
    assert await train(client, 10, 1) == expected
    await client.open(rank=2)
    body |= {"model_id": client.model, "seq_id": 1}
    failed = await client.result(await client.tree("load_weights", body))
    assert failed["category"] == "user"
    assert "another rank" in failed["error"]
    assert await train(client, 2, 1) == [first]  # nothing was changed


async def test_states_that_cannot_be_loaded_are_refused_in_words(client: Client) -> None:
    await client.open()
    sampler = (await save(client, 1, "s", "save_weights_for_sampler"))["path"]
    assert "no state of an optimizer" in (await load(client, sampler))["error"]
    assert not [name for name in client.rank._adapters._held if name == client.model]
    assert "path" in await load(client, sampler, 2, optimizer=False)
    for number, (path, more, said) in enumerate(
        [
            (f"tinker://{client.model}/weights/none", {}, "there is no checkpoint"),
            ("/etc/passwd", {}, "is no address"),
            ("tinker://a/weights/..", {}, "is no address"),
            (sampler, {"weights_access_token": "t"}, "belong to the key"),
            (sampler, {"base_model": "another"}, "not 'another'"),
            (sampler, {"optimizer_config": {"type": "dimuon"}}, "dimuon"),
        ],
        3,
    ):
        failed = await load(client, path, number, **more)
        assert said in failed["error"], path
    refused = await client.post("load_weights", {"session_id": client.session, "path": sampler})
    assert refused.status_code == 400


@pytest.mark.parametrize("name", ["a.tmp", "..", ".a", "a/b", "", "é", "a" * 201])
async def test_names_that_are_no_folders_are_refused(client: Client, name: str) -> None:
    await client.open()
    failed = await save(client, 1, name)
    assert "must have letters" in failed["error"]


async def test_a_name_is_taken_once_unless_it_is_to_be_overwritten(client: Client) -> None:
    await client.open()
    await save(client, 1, "state", user_metadata={"first": "1"})
    assert "exists already" in (await save(client, 2, "state"))["error"]
    await train(client, 3, 1)
    await save(client, 5, "state", overwrite=True)
    (found,) = (await get(client, "checkpoints"))["checkpoints"]
    assert found["user_metadata"] is None
    assert "ttl_seconds" in (await save(client, 6, "short", ttl_seconds=60))["error"]


async def test_lists_have_pages_and_what_belongs_to_the_owner(client: Client) -> None:
    await client.open()
    await save(client, 1, "one", ttl_seconds=3600)
    await save(client, 2, "two", "save_weights_for_sampler")
    first = client.model
    await client.open()
    page = await get(client, "checkpoints", limit=1, offset=1)
    assert page["cursor"] == {"offset": 1, "limit": 1, "total_count": 2}
    (one,) = page["checkpoints"]
    assert (one["checkpoint_id"], one["checkpoint_type"]) == ("weights/one", "training")
    assert one["size_bytes"] > 1000
    assert datetime.fromisoformat(one["expires_at"]) > datetime.now(UTC) + timedelta(minutes=59)
    assert len((await get(client, f"training_runs/{first}/checkpoints"))["checkpoints"]) == 2
    runs = await get(client, "training_runs")
    assert [run["training_run_id"] for run in runs["training_runs"]] == [client.model, first]
    run = await get(client, f"training_runs/{first}")
    assert run["last_checkpoint"]["tinker_path"].endswith("/weights/one")
    assert run["last_sampler_checkpoint"]["checkpoint_type"] == "sampler"
    assert (await get(client, f"training_runs/{client.model}"))["last_checkpoint"] is None
    page = await get(client, "training_runs", limit=1, offset=1)
    assert [run["training_run_id"] for run in page["training_runs"]] == [first]
    for path in ("training_runs/*", f"training_runs/{first}"):
        answer = await client.http.get(f"/api/v1/{path}", headers=OTHER)
        assert answer.status_code == 404
    for path, name in (("checkpoints", "checkpoints"), ("training_runs", "training_runs")):
        other = await client.http.get(f"/api/v1/{path}", headers=OTHER)
        assert other.json()[name] == []


async def test_a_checkpoint_is_kept_and_deleted_by_its_owner_alone(
    client: Client,
) -> None:
    await client.open()
    path = (await save(client, 1, "state"))["path"]
    place = f"/api/v1/training_runs/{client.model}/checkpoints/weights/state"
    for method, end in (("PUT", "/ttl"), ("DELETE", "")):
        body = {"ttl_seconds": None} if method == "PUT" else None
        refused = await client.http.request(method, place + end, headers=OTHER, json=body)
        assert refused.status_code == 404, method
    info = {"tinker_path": path}
    assert (await client.post("weights_info", info, **OTHER)).status_code == 404
    wrong = await client.http.put(f"{place}/ttl", headers=KEY, json={"ttl_seconds": 5})
    assert wrong.status_code == 400
    assert (await client.http.delete(place, headers=KEY)).status_code == 200
    assert (await client.post("weights_info", info)).status_code == 404
    assert "path" in await save(client, 2, "state")  # the name is free again


async def test_an_expired_checkpoint_is_gone_and_its_files_too(
    served: tuple[Client, TinkerService],
) -> None:
    client, service = served
    await client.open()
    path = (await save(client, 1, "state", ttl_seconds=3600))["path"]
    kept = service.checkpoints
    found = kept.find(path, kept.of(_owner(service))[0].owner)
    place = f"/api/v1/training_runs/{client.model}/checkpoints/weights/state/ttl"
    assert (await client.http.put(place, headers=KEY, json={"ttl_seconds": None})).is_success
    assert (await get(client, "checkpoints"))["checkpoints"][0]["expires_at"] is None
    past = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()
    kept.update(_with(found, expires=past))
    assert (await client.post("weights_info", {"tinker_path": path})).status_code == 404
    assert (await get(client, "checkpoints"))["checkpoints"] == []
    kept.tidy()
    assert not kept.folder(found).exists()


def _owner(service: TinkerService) -> str:
    return next(iter(service._sessions.values())).owner


def _with(checkpoint: Checkpoint, **changes: Any) -> Checkpoint:
    return replace(checkpoint, **changes)


async def test_a_copy_is_made_once_and_outlives_its_source(client: Client) -> None:
    await client.open()
    expected = await train(client, 1, 1)
    path = (await save(client, 3, "state"))["path"]
    body = {"source_path": path, "destination_project_id": "p", "ttl_seconds": 3600}
    key = KEY | {"X-Idempotency-Key": "once"}
    copies = [(await client.post("copy_weights", body, **key)).json() for _ in range(2)]
    assert copies[0] == copies[1]
    copied = copies[0]["tinker_path"]
    assert copied.startswith("tinker://")
    assert copied.endswith("/weights/state")
    assert copied != path
    place = f"/api/v1/training_runs/{client.model}/checkpoints/weights/state"
    await client.http.delete(place, headers=KEY)
    await load(client, copied)
    assert (await train(client, 1, 1))[0] < expected[0]
    refused = await client.post("copy_weights", {"source_path": copied}, **OTHER)
    assert refused.status_code == 404


async def test_files_are_downloaded_by_links_that_need_no_key(
    served: tuple[Client, TinkerService], tmp_path: Path
) -> None:
    client, service = served
    await client.open()
    path = (await save(client, 1, "out", "save_weights_external"))["path"]
    assert path == f"tinker://{client.model}/external_weights/out"
    place = f"training_runs/{client.model}/checkpoints/external_weights/out"
    links = await get(client, f"{place}/external_weights_urls")
    assert set(links["urls"]) == {"adapter_config.json", "adapter_model.safetensors"}
    assert datetime.fromisoformat(links["expires"]) > datetime.now(UTC)
    url = links["urls"]["adapter_config.json"]
    assert url.startswith("http://server/api/v1/files/")
    assert json.loads((await client.http.get(url)).content)["r"] == 4
    again = await get(client, f"{place}/external_weights_urls")
    assert (again["urls"], len(service.links)) == (links["urls"], 2)
    service.links.clear()
    assert (await client.http.get(url)).status_code == 404
    answer = await client.http.get(f"/api/v1/{place}/external_weights_urls", headers=OTHER)
    assert answer.status_code == 404


async def test_a_save_that_fails_leaves_nothing(
    served: tuple[Client, TinkerService], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = served
    await client.open()

    def write(name: str, folder: Path, optimizer: bool) -> None:
        (folder / "half").write_bytes(b"1234")
        raise TurnwiseError("no space left on device")

    monkeypatch.setattr(client.rank._adapters, "write", write)
    assert "no space left" in (await save(client, 1, "state"))["error"]
    assert not [each for each in (tmp_path / "tinker").rglob("*") if each.is_file()]
    monkeypatch.undo()
    monkeypatch.setattr("turnwise.tinker.checkpoints._FREE_BYTES", 2**60)
    assert "disk is full" in (await save(client, 2, "state"))["error"]
    assert not [each for each in (tmp_path / "tinker").rglob("*") if each.is_file()]
    monkeypatch.undo()
    assert "path" in await save(client, 3, "state")


def test_a_change_of_an_overwritten_checkpoint_has_no_effect(
    tmp_path: Path,
) -> None:
    kept = Checkpoints(tmp_path)

    def saved(version: int) -> Checkpoint:
        made = Checkpoint("run", "weights", "state", "me", "model", version, {})
        kept.commit(made, kept.begin(made, overwrite=True), overwrite=True)
        return made

    old, new = saved(1), saved(2)
    with pytest.raises(InputError, match="was overwritten"):
        kept.update(replace(old, expires="2000"))
    kept.remove(old)
    assert kept.find(new.address, "me") == new


async def test_a_server_of_another_model_neither_samples_nor_loads(
    config: Config, tmp_path: Path
) -> None:
    async with opened(config, tmp_path) as (client, _):
        await client.open()
        path = (await save(client, 1, "state"))["path"]
        await snapshot(client, 2, 0)
        saved, first = tmp_path / "tinker" / client.model / "snapshots" / "0", client.session
    async with opened(config, tmp_path) as (client, service):
        service.model_name, service._names = "other", {"other"}
        service.restore()
        assert not service._sessions
        assert (await client.post("session_heartbeat", {"session_id": first})).status_code == 410
        assert saved.is_dir()  # the other model may be served here again
        client.session = (await client.tree("create_session", {}))["session_id"]
        body = {"session_id": client.session, "sampling_session_seq_id": 1, "model_path": path}
        refused = await client.post("create_sampling_session", body)
        assert "this server has the model other" in refused.json()["detail"]
        failed = await load(client, path, base_model="other")
        assert "this server has the model other" in failed["error"]


async def test_an_encrypted_export_is_refused_in_words(client: Client) -> None:
    await client.open()
    keys = {"age_encryption_recipients": ["age1"]}
    failed = await save(client, 1, "out", "save_weights_external", **keys)
    assert "encrypts no files" in failed["error"]
    assert "path" in await save(client, 2, "out", "save_weights_external")


async def test_a_sampler_reports_overwritten_or_deleted_weights(
    client: Client,
) -> None:
    await client.open()
    path = (await save(client, 1, "state"))["path"]
    body = {"session_id": client.session, "sampling_session_seq_id": 1, "model_path": path}
    sampler = (await client.tree("create_sampling_session", body))["sampling_session_id"]
    assert await sampled(client, sampler, 0)
    ask: dict[str, Any] = {"sampling_session_id": sampler, "sampling_params": {"max_tokens": 1}}
    ask["prompt"] = {"chunks": [{"tokens": IDS}]}
    await save(client, 2, "state", overwrite=True)
    failed = await client.result(await client.tree("asample", ask | {"seq_id": 1}))
    assert (failed["category"], "was overwritten" in failed["error"]) == ("user", True)
    place = f"/api/v1/training_runs/{client.model}/checkpoints/weights/state"
    await client.http.delete(place, headers=KEY)
    failed = await client.result(await client.tree("asample", ask | {"seq_id": 2}))
    assert "there is no checkpoint" in failed["error"]


async def test_after_a_kill_samplers_go_on_and_training_resumes(
    config: Config, tmp_path: Path
) -> None:
    stack = AsyncExitStack()
    client, _ = await stack.enter_async_context(opened(config, tmp_path))
    await client.open()
    await train(client, 1, 2)
    path = (await save(client, 5, "state"))["path"]
    temporary = await snapshot(client, 6, 0)
    body = {"session_id": client.session, "sampling_session_seq_id": 1, "base_model": "model"}
    base = (await client.tree("create_sampling_session", body))["sampling_session_id"]
    before = [await sampled(client, each, 0) for each in (temporary, base)]
    expected = await train(client, 7, 1)
    folder = tmp_path / "tinker" / client.model
    (folder / "weights" / "half.tmp").mkdir()  # as a kill in the middle of a save leaves it
    (folder / "weights" / "no_meta").mkdir()
    (folder / "snapshots" / "77").mkdir()
    # The first server ends no session: nothing of it runs any more.
    async with opened(config, tmp_path) as (again, service):
        service.restore()
        again.session, again.model = client.session, client.model
        assert (await again.post("session_heartbeat", {"session_id": again.session})).is_success
        assert [await sampled(again, each, 0) for each in (temporary, base)] == before
        gone = await again.post("optim_step", {"model_id": again.model, "seq_id": 8})
        assert gone.status_code == 404
        assert "create_training_client_from_state" in gone.json()["detail"]
        lost = await again.post("retrieve_future", {"request_id": f"{again.model}:7"})
        assert lost.status_code == 410
        assert [each.name for each in (folder / "weights").iterdir()] == ["state"]
        assert [each.name for each in (folder / "snapshots").iterdir()] == ["0"]
        await load(again, path)
        assert await train(again, 1, 1) == expected
        other = {"session_id": again.session}
        assert (await again.post("session_heartbeat", other, **OTHER)).status_code == 410
        await again.tree(f"sessions/{again.session}/finish", {"reason": {"type": "success"}})
        assert not (folder / "snapshots").exists()
        assert not list((tmp_path / "tinker_sessions").iterdir())
    async with opened(config, tmp_path) as (_, service):
        service.restore()
        assert not service._sessions
    await stack.aclose()


def test_an_overwrite_that_a_kill_interrupts_leaves_one_of_both(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    new = Checkpoint("run", "weights", "state", "me", "model", 1, {"rank": 4})
    kept.commit(new, kept.begin(new))
    half = kept.begin(_with(new, version=2), overwrite=True)
    names = tmp_path / "run" / "weights"
    (names / "state.tmp").symlink_to(half)
    newer = tmp_path / "run" / "versions" / "newer"
    newer.mkdir()
    (newer / "meta.json").write_text('{"key of a later version": 1}')
    (names / "newer").symlink_to(newer)
    kept.tidy(())
    assert (newer / "meta.json").exists()
    (names / "newer").unlink()
    kept.tidy(())
    assert kept.find(new.address, "me").version == 1
    assert [each.name for each in names.iterdir()] == ["state"]
    assert [*(tmp_path / "run" / "versions").iterdir()] == [kept.folder(new).resolve()]


async def test_a_client_leaves_a_run_folder_with_exact_trajectories(
    served: tuple[Client, TinkerService], tmp_path: Path
) -> None:
    client, _ = served
    await client.open()
    await train(client, 1, 1)
    sampler = await snapshot(client, 3, 0)
    first = await sampled(client, sampler, 0)
    second = [*IDS, *first[0][0], 11, 12]  # a tool's answer after the first sample's turn
    later = await sampled(client, sampler, 1, second)
    data = [reinforced(IDS, each, 1.0 - 2 * n) for n, each in enumerate(first)]
    whole = reinforced(second, later[0], 0.5)
    for n, value in enumerate(first[0][1], len(IDS) - 1):
        whole["logprobs"][n], whole["advantages"][n] = value, 0.5
    changed = reinforced(IDS, first[0], 1.0)
    changed["target_tokens"][-1] += 1
    await client.trained(4, [*data, whole], "importance_sampling")
    await client.trained(5, [changed], "importance_sampling")
    await client.step(6, learning_rate=1e-3)
    await client.train(7, data, "importance_sampling", forward_only=True)
    await client.tree(f"sessions/{client.session}/finish", {"reason": {"type": "success"}})
    folder = tmp_path / "tinker" / client.model
    run = ViewedRun(folder, "client")
    supervised, row = run.rows()["rows"]
    assert (supervised["step"], supervised["trained_tokens"]) == (1, 5)
    assert supervised["loss"] > 0
    assert "reward_mean" not in row
    lengths = [len(each[0]) for each in (*first, later[0], first[0], first[0])]
    assert (row["step"], row["trained_tokens"]) == (2, sum(lengths))
    exact = sum(lengths) - 1  # the token that was changed
    assert row["exact_percent"] == pytest.approx(100 * exact / sum(lengths))
    assert row["trajectories"] == 4
    assert row["staleness"] == {"0": exact}
    made = list(read_jsonl(folder / "trajectories" / "step-0002.jsonl"))
    assert [len(each.turns) for each in made] == [1, 1, 2, 1]
    assert [each.sample_index for each in made] == [0, 1, 2, 3]
    assert len({each.problem_id for each in made}) == 1
    sent = first[0][0], first[1][0], later[0][0], first[0][0][:-1]
    for each, ids in zip(made, sent, strict=True):
        assert each.turns[-1].completion_token_ids == ids
        assert audit(each).first_violation is None
        assert set(each.turns[0].weight_versions) == {1}
    assert made[2].turns[1].added_token_ids == [11, 12]
    values = run.token_values("step-0002", 2)
    assert values["turn"] == [0] * lengths[0] + [1] * lengths[2]
    assert set(values["advantage"]) == {0.5}
    index = run.index("step-0002")
    assert [each["turns"] for each in index.summaries] == [1, 1, 2, 1]
    assert run.alarms() == {"alarms": [], "error": None}
    assert run.config()["name"] == client.model
    assert run.search("step-0002", "[11, 12]")["found"] == [2]  # `str` decodes here


async def test_losses_are_divided_by_all_trained_tokens(
    served: tuple[Client, TinkerService], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, service = served
    await client.open()
    plain: dict[str, Any] = {name: SUPERVISED[name] for name in ("tokens", "target_tokens")}
    odd = plain | {"advantages": [1.0, 2.0]}  # an input that this loss does not read
    two: dict[str, Any] = {"tokens": IDS[:-1]}
    two["target_tokens"] = [[each, 1] for each in IDS[1:]]
    two["weights"] = [[0.5, 0.5]] * 4 + [[0.0, 0.0]]
    monkeypatch.setattr("turnwise.tinker.run_log._MAX_TRAINED", 80)
    losses = [
        loss_of(await client.trained(seq, data, "cross_entropy"))
        for seq, data in enumerate([[plain], [odd, two], [plain]], 1)
    ]
    assert service._sampled.trained == 74  # of two data
    await client.step(4, learning_rate=1e-3)
    assert service._sampled.trained == 0
    await client.tree(f"sessions/{client.session}/finish", {})
    (row,) = ViewedRun(tmp_path / "tinker" / client.model, "client").rows()["rows"]
    assert row["trained_tokens"] == 19
    assert row["loss"] == pytest.approx(sum(losses) / 19)


async def test_a_client_that_takes_no_step_leaves_nothing(
    served: tuple[Client, TinkerService], tmp_path: Path
) -> None:
    client, _ = served
    await client.open()
    await client.trained(1, [SUPERVISED], "cross_entropy")
    await snapshot(client, 2, 0)
    await client.tree(f"sessions/{client.session}/finish", {"reason": {"type": "success"}})
    assert not list((tmp_path / "tinker").iterdir())


async def test_a_run_folder_that_cannot_be_written_stops_nobody(
    served: tuple[Client, TinkerService], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client, _ = served
    await client.open()
    (tmp_path / "tinker").mkdir()
    (tmp_path / "tinker" / client.model).write_text("in the way")
    await train(client, 1, 2)
    await asyncio.sleep(0)
    await train(client, 5, 1)
    assert "lacks a step" in caplog.text


def test_samples_are_found_by_ids_until_others_replace_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("turnwise.tinker.run_log._MAX_SAMPLED", 12)
    index = SampleIndex(str)

    def done(*ids: int) -> Completion:
        return Completion([*ids], [-0.5] * len(ids), [0] * len(ids), "stop")

    index.add("me", Prompt([1, 2]), [done(3, 4), done(3, 5)], 7)
    ids = Prompt([1, 2, 3, 4])
    ((part, found),) = index.turns("me", ids)
    assert (part.start, part.length, found.ids.tolist(), found.version) == (2, 2, [3, 4], 7)
    assert index.turns("you", ids) == []
    assert [part.length for part, _ in index.turns("me", Prompt([1, 2, 3, 6]))] == [1]
    assert index.turns("me", Prompt([0, 1, 2, 3])) == []
    index.add("me", Prompt([1, 2, 3, 4, 6]), [done(7)], 8)
    both = Prompt([1, 2, 3, 4, 6, 7, 8])
    assert [found.version for _, found in index.turns("me", both)] == [7, 8]
    index.add("me", Prompt([9] * 9), [done(9)], 9)
    assert index.turns("me", both) == []
    assert index._size == 0


def test_a_folder_has_one_server_at_a_time_in_one_program_too(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "tinker"
    refused = pytest.raises(InputError, match="another server's")
    with _alone_in(folder), refused, _alone_in(folder):
        pass
    with _alone_in(folder):
        (tmp_path / "file").write_text("")
        with pytest.raises(TurnwiseError, match="cannot be written"), _alone_in(tmp_path / "file"):
            pass
