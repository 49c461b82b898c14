"""Commands and workers of agents, without a server: what they get, write, and may break."""

import asyncio
import json
import logging
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.conftest import ROOT
from turnwise.core.child import LINES_A_SECOND
from turnwise.core.deadlines import StallClock
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollouts import agents as agents_module
from turnwise.rollouts.agents import (
    AgentWorker,
    clean_environment,
    run_command,
    worker_tasks,
)

PROBLEMS = {
    "an option": "--help",
    "a hyphen": "-",
    "nothing": "",
    "200 kB": "x" * 200_000,
    "a NUL byte": "a\0b",
    "a line break": "a\nb",
    "shell": "$(exit 3); `exit 3` '\"",
    "a lone surrogate": "a\ud800b",
}
PLAYS = """
import json, os, sys
row = json.load(sys.stdin)
given = os.environ.get("TURNWISE_PROBLEM")
assert given is None or json.loads(given) == row
assert (given is None) == (len(row["problem"]) > 65_536)
json.dump([sys.argv[1:], row["problem"]], open(row["out"], "w"))
"""
SERVES = f"""
import json, sys
sys.path.insert(0, {str(ROOT / "src" / "turnwise")!r})
from agent_worker import serve
def run(task, base_url):
    return {{"metrics": {{"argv": len(sys.argv), "length": len(task["problem"])}}}}
serve(run)
"""
RAW = """
import json, sys
def say(text):
    sys.stdout.write(text + "\\n")
    sys.stdout.flush()
for line in sys.stdin:
    request = json.loads(line)
    if request["method"] == "run":
        {body}
"""


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    """Writes a program, and returns its command."""

    def write(text: str) -> str:
        path = tmp_path / f"program{len(list(tmp_path.iterdir()))}.py"
        path.write_text(text)
        return f"{sys.executable} -S {path}"

    return write


@asynccontextmanager
async def running(command: str) -> AsyncIterator[AgentWorker]:
    worker = AgentWorker(command)
    try:
        yield worker
    finally:
        await worker.close()


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
async def test_a_command_gets_any_problem_whole_and_never_as_an_option(
    problem: str, program: Callable[[str], str], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    row = {"problem": problem, "out": str(out)}
    await run_command(f"{program(PLAYS)} --its-own", clean_environment(()), row, StallClock(60.0))
    assert json.loads(out.read_text()) == [["--its-own"], problem]


async def test_a_worker_gets_any_problem_whole(program: Callable[[str], str]) -> None:
    async with running(program(SERVES)) as worker:
        reports = await asyncio.gather(
            *(worker.run({"task": {"problem": p}, "base_url": ""}) for p in PROBLEMS.values())
        )
    assert [report["metrics"] for report in reports] == [
        {"argv": 1.0, "length": float(len(problem))} for problem in PROBLEMS.values()
    ]


def raw(program: Callable[[str], str], body: str) -> str:
    return program(RAW.replace("{body}", textwrap.indent(body, " " * 8).strip()))


WRONG = {
    "no report": '"result": 3',
    "not a number": '"result": {"reward": NaN}',
    "infinite": '"result": {"reward": 1e999}',
    "a huge integer": '"result": {"reward": ' + "9" * 5_000 + "}",
    "a text": '"result": {"reward": "1"}',
    "a lone surrogate": '"result": {"metrics": {"\\ud800": 1}}',
    "deep": '"result": ' + "[" * 5_000 + "]" * 5_000,
    "many": '"result": {"sessions": [' + '"",' * 600_000 + '""]}',
    "cut short": '"result": {"reward": 1',
}


async def test_a_wrong_answer_costs_its_own_trajectory(program: Callable[[str], str]) -> None:
    body = (
        'end = "" if "cut" in request["task"] else "}"\n'
        'say(\'{"id": \' + str(request["id"]) + ", " + request["task"]["said"] + end)'
    )
    async with running(raw(program, body)) as worker:
        ask = [
            worker.run({"task": {"said": said, **({"cut": 1} if name == "cut short" else {})}})
            for name, said in WRONG.items()
        ]
        sound = worker.run({"task": {"said": '"result": {"reward": 1}'}})
        *wrong, right = await asyncio.gather(*ask, sound, return_exceptions=True)
        assert right == {"reward": 1.0}
        for name, error in zip(WRONG, wrong, strict=True):
            assert isinstance(error, TrajectoryError), (name, error)
            assert error.reason == "agent_reply", (name, error)
            assert len(str(error)) < 1_000


async def test_what_is_no_answer_is_logged_up_to_a_limit(
    program: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "turnwise")
    body = """
for _ in range(20_000):
    sys.stderr.write("noise\\\\n")
for line in ("{", "[]", "[1]", "{}", '{"id": 1.5}', '{"id": {}}', "null", "{'id': 1}"):
    say(line)
for _ in range(2_000):
    say("more")
say('{"id": 999, "result": null}')
say('{"id": %d, "result": null}' % request["id"])
"""
    async with running(raw(program, body.replace("\\\\", "\\"))) as worker:
        assert await worker.run({}) == {}
    lines = caplog.messages
    noise = [line for line in lines if line.endswith(": noise")]
    assert len(noise) % LINES_A_SECOND == 0
    assert len(noise) < 2_000
    left = sum(int(line.split("[")[1].split()[0]) for line in lines if "more lines left" in line)
    assert left + len(lines) > 20_000 + 2_000
    assert any("wrote a line that is no answer: [1]" in line for line in lines)


async def test_an_agents_words_drive_no_terminal(program: Callable[[str], str]) -> None:
    said = '"error": "\\\\u001b]0;TITLE\\\\u0007\\\\u001b[2Jall is well"'
    body = f'say(\'{{"id": %d, {said}}}\' % request["id"])'
    async with running(raw(program, body)) as worker:
        with pytest.raises(TrajectoryError) as raised:
            await worker.run({})
    assert r"\x1b]0;TITLE\x07\x1b[2Jall is well" in str(raised.value)
    assert str(raised.value).isprintable()


async def test_a_worker_that_ends_leaves_nobody_waiting(
    program: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents_module, "_END_SECONDS", 0.5)
    # A process that has left the group holds the worker's pipes.
    body = """
import subprocess
subprocess.Popen(["sleep", "30"], stdin=subprocess.DEVNULL, start_new_session=True)
sys.exit(7)
"""
    async with running(raw(program, body)) as worker:
        with pytest.raises(TrajectoryError, match="ended with 7"):
            await worker.run({})
        assert worker._life is not None
        assert worker._life.ended


LACK = """
import asyncio, os, resource, sys
from turnwise.config import RolloutConfig
from turnwise.core.deadlines import StallClock
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollouts.agents import AgentWorker, clean_environment, run_command
from turnwise.rollouts.remote_episode import EnvironmentProcesses

def environment(row): ...

async def outcomes():
    processes = EnvironmentProcesses(environment, RolloutConfig())
    async def command(name):
        await run_command(name, clean_environment(()), {}, StallClock(60.0))
    async def worker(name):
        await AgentWorker(name).run({})
    async def process(name):
        processes.start()
    for start, name in ((command, "true"), (worker, "cat"), (process, "")):
        try:
            await start(name)
            print("started")
        except (InputError, TrajectoryError) as error:
            print(type(error).__name__, getattr(error, "reason", ""), error)

async def main():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    await outcomes()
    for number in taken:
        os.close(number)
    await run_command("true", clean_environment(()), {}, StallClock(60.0))
    print("true starts")

asyncio.run(main())
os._exit(0)
"""


def test_a_momentary_lack_of_descriptors_fails_trajectories_only() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LACK], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stderr
    for line, reason in zip(
        lines, ("agent_error", "agent_crashed", "environment_crashed"), strict=False
    ):
        assert line.startswith(f"TrajectoryError {reason} "), lines
        assert "Too many open files" in line
    assert lines[3] == "true starts"


async def test_a_program_that_vanishes_mid_run_fails_trajectories_only(tmp_path: Path) -> None:
    path = tmp_path / "agent"
    path.write_text(f"#!{sys.executable}\n")
    environment, clock = clean_environment(()), StallClock(60.0)
    with pytest.raises(InputError, match=r"rollout\.agent: .* Permission denied"):
        await run_command(str(path), environment, {}, clock)
    path.chmod(0o755)
    await run_command(str(path), environment, {}, clock)
    worker = AgentWorker(str(path))
    with pytest.raises(TrajectoryError, match="ended with"):
        await worker.run({})
    path.unlink()
    with pytest.raises(TrajectoryError, match="No such file") as raised:
        await run_command(str(path), environment, {}, clock)
    assert raised.value.reason == "agent_error"
    with pytest.raises(TrajectoryError, match="No such file") as raised:
        await worker.run({})
    assert raised.value.reason == "agent_crashed"
    await worker.close()


def test_tasks_have_the_variables_of_agent_env_and_a_limit(
    program: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASKS_TOKEN", "t")
    listing = program(
        "import json, os\n"
        'print(json.dumps({"id": 0, "result": [{"seen": os.environ.get("TASKS_TOKEN")}]}))\n'
    )
    assert worker_tasks(listing) == [{"seen": None}]
    assert worker_tasks(listing, ["TASKS_TOKEN"]) == [{"seen": "t"}]
    monkeypatch.setattr(agents_module, "_TASKS_BYTES", 1 << 20)
    endless = program("while True: print('x' * 1000)\n")
    with pytest.raises(InputError, match="sent more than 1,048,576 bytes"):
        worker_tasks(endless)
    wrong = {'{"id": 0, "result": [1]}': "result.0: ", "[" * 9_999: "not readable JSON"}
    for said, words in wrong.items():
        with pytest.raises(InputError, match=f"listed no tasks, and ended with 0: .*{words}"):
            worker_tasks(program(f"print({said!r})\n"))
    monkeypatch.setattr(agents_module, "_TASKS_SECONDS", 0.3)
    with pytest.raises(InputError, match=r"listed no tasks within 0.3 s"):
        worker_tasks(program("import time; time.sleep(600)\n"))
