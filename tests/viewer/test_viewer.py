"""The viewer's server, its guard, what it reads of run folders, and exported pages."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from turnwise.cli import app as commands
from turnwise.config import Config, ModelConfig, dump_config
from turnwise.engine.protocol import TurnTimes
from turnwise.observe.metrics import StepMetrics
from turnwise.run.token_values import write_columns
from turnwise.training.reports import RECORDED
from turnwise.trajectory import Outcome, Trajectory, write_jsonl
from turnwise.viewer import server
from turnwise.viewer.run_files import (
    ViewedRun,
    find_tokenizer,
    open_runs,
    read_vocabulary,
    summarise,
    texts_of,
)
from turnwise.viewer.server import make_app, static_files

PORT, TOKEN = 8123, "a-token-that-is-random"
HOST = f"http://127.0.0.1:{PORT}"
ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
STEP = "/api/runs/demo/files/step-0001"


def a_trajectory(number: int, said: str) -> Trajectory:
    trajectory = Trajectory(f"rows:{number // 2}", number % 2, outcome=Outcome(float(number % 2)))
    trajectory.add_turn([1, 2], [3, 4], [-0.5, -0.1], [0, 0], "stop")
    trajectory.add_turn([1, 2, 3, 4, 5], [6, 4], [-0.25, -2.0], [0, 1], "stop")
    if number == 3:
        trajectory.add_turn([1, 2, 7], [4], [-0.25], [1], "stop", fork_reason="history_edited")
    trajectory.messages = [
        {"role": "user", "content": f"Question {number}?"},
        {"role": "assistant", "content": said},
    ]
    trajectory.status = "completed"
    trajectory.set_outcome(parts={"environment": float(number % 2), "style": 0.5})
    trajectory.set_outcome(metrics={"distance": float("nan")} if number == 2 else {})
    return trajectory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "demo"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(dump_config(Config(model=ModelConfig(path="model"))))
    said = ["Plain.", ATTACK, 'A "quoted" Ärger', "The answer is 4."]
    write_jsonl(
        run / "trajectories" / "step-0001.jsonl",
        [a_trajectory(number, text) for number, text in enumerate(said)],
    )
    columns = {name: np.array([0.5, 0.25], np.float32) for name in RECORDED}
    places = {"trajectory": [1, 3], "turn": [0, 2], "at": [1, 0], "staleness": [0, 1]}
    columns |= {name: np.array(values, np.int32) for name, values in places.items()}
    write_columns(run / "training" / "step-0001.safetensors", columns)
    rows = [json.dumps(StepMetrics(step=n, reward_mean=n / 2).to_json()) for n in range(3)]
    (run / "metrics.jsonl").write_text("".join(f"{row}\n" for row in rows))
    tokenizer = run / "checkpoints" / "step-0001" / "tokenizer.json"
    tokenizer.parent.mkdir(parents=True)
    vocabulary = {"a": 1, "Ġb": 2, "Ċ": 3, "ä": 4, "Ã": 5, "<x>": 6}
    tree = {"model": {"vocab": vocabulary}, "decoder": {"type": "ByteLevel"}}
    tokenizer.write_text(json.dumps(tree | {"added_tokens": [{"id": 7, "content": "<|end|>"}]}))
    return run


@pytest.fixture
def client(folder: Path) -> TestClient:
    """A client that has opened the address with the token."""
    app = make_app(open_runs([folder]), TOKEN, PORT)
    client = TestClient(app, base_url=HOST, raise_server_exceptions=False)
    assert client.get(f"/?token={TOKEN}").status_code == 200
    return client


def test_who_has_no_token_gets_nothing(folder: Path) -> None:
    app = make_app(open_runs([folder]), TOKEN, PORT)
    client = TestClient(app, base_url=HOST, follow_redirects=False)
    for path in ("/", "/static/app.js", "/api/runs", STEP, "/?token=", f"/?token={TOKEN}x"):
        assert client.get(path).status_code == 403, path
    opened = client.get(f"/?token={TOKEN}&x=1")
    assert (opened.status_code, opened.headers["location"]) == (303, "/?x=1")
    assert "HttpOnly" in opened.headers["set-cookie"]
    assert client.get("/api/runs").status_code == 200
    assert client.get("/api/runs?token=wrong").status_code == 403
    assert client.post("/api/runs").status_code == 405
    for host in ("evil.example", f"evil.example:{PORT}", "127.0.0.1.evil.example:1"):
        assert client.get("/api/runs", headers={"host": host}).status_code == 403, host
    client.cookies = {f"turnwise-view-{PORT + 1}": TOKEN}  # type: ignore[assignment]
    assert client.get("/api/runs").status_code == 403
    # No other site becomes the target of the redirect.
    moved = client.get(f"{HOST}//evil.example/?token={TOKEN}")
    assert re.match(r"/[^/\\]", moved.headers["location"])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"n": 99}, "n is a number from 1 to 16"),
        ({"edits": {"0": 1}}, "edits are texts"),
        ({"edits": ["x"]}, "edits are texts"),
        ({"weights": "--debug"}, "weights are then or now"),
        ({"turn": "1"}, "turn is a number"),
        ({"output": "/tmp/x"}, "a request has no output"),
        ([], "a request is a JSON object"),
        ({"edits": {"0": "x" * 2**16}}, "at most 65,536 bytes"),
        ({"edits": {"x": "y"}}, "turnwise: --edit x=y: write the message's number"),
    ],
)
def test_a_request_for_continuations_is_checked(
    client: TestClient, asked: object, said: str
) -> None:
    own = {"origin": HOST}
    answer = client.post(f"{STEP}/0/whatif", json=asked, headers=own)
    assert answer.status_code == 422
    assert said in answer.json()["detail"]


def test_only_the_page_itself_may_ask_for_continuations(client: TestClient, folder: Path) -> None:
    path = f"{STEP}/0/whatif"
    for headers in ({}, {"origin": "http://evil.example"}, {"origin": f"{HOST}0"}):
        assert client.post(path, json={}, headers=headers).status_code == 403
    assert client.post("/api/runs", json={}, headers={"origin": HOST}).status_code == 405
    assert client.post("/api/runs/whatif", json={}, headers={"origin": HOST}).status_code == 404
    bare = TestClient(make_app(open_runs([folder]), TOKEN, PORT), base_url=HOST)
    assert bare.post(path, json={}, headers={"origin": HOST}).status_code == 403


def test_no_path_leads_out_of_the_runs(client: TestClient, folder: Path) -> None:
    outside = folder.parent / "secret.jsonl"
    write_jsonl(outside, [a_trajectory(0, "secret")])
    (folder / "trajectories" / "step-0009.jsonl").symlink_to(outside)
    [run] = client.get("/api/runs").json()["runs"]
    assert list(run["files"]) == ["step-0001"]
    for path in (
        "/static/..%2fserver.py",
        "/static/%2e%2e/%2e%2e/cli.py",
        "/static//etc/passwd",
        "/api/runs/..%2f..%2fetc/config",
        "/api/runs/demo/files/..%2f..%2fsecret",
        "/api/runs/demo/files/step-0009",
        "/api/runs/demo/files/step-0009/0",
        f"{STEP}/99",
        f"{STEP}/-1",
        "/api/runs/other/metrics",
    ):
        assert client.get(path).status_code == 404, path


def test_links_and_pipes_in_a_run_folder_are_not_opened(client: TestClient, folder: Path) -> None:
    """A run folder may come from somebody else; links of whole folders lead out of it too."""
    steps = (folder / "trajectories").rename(folder.parent / "elsewhere")
    os.symlink(steps, folder / "trajectories")
    [run] = client.get("/api/runs").json()["runs"]
    assert run["files"] == {}
    assert client.get(STEP).status_code == client.get(f"{STEP}/0").status_code == 404
    (folder / "trajectories").unlink()
    steps.rename(folder / "trajectories")
    assert client.get(f"{STEP}/0").status_code == 200
    os.mkfifo(folder / "trajectories" / "step-0002.jsonl")
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    os.mkfifo(folder / "metrics.jsonl")
    [run] = client.get("/api/runs").json()["runs"]
    assert list(run["files"]) == ["step-0001"]
    assert client.get("/api/runs/demo/files/step-0002").status_code == 404
    answer = client.get("/api/runs/demo/metrics")
    assert answer.status_code == 422
    assert "not a regular file" in answer.json()["detail"]


def test_the_page_loads_its_own_files_and_makes_no_html_of_text(client: TestClient) -> None:
    answer = client.get("/")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    files = static_files()
    wanted = re.findall(r'(?:src|href)="(/[^"]*)"', answer.text)
    wanted += [f"/static/{name}" for name in files if name.endswith(".js")]
    assert len(wanted) > 10
    for path in wanted:
        assert client.get(path).status_code == 200, path
    for name, text in files.items():
        addresses = set(re.findall(r"https?://[^\s\"'`]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name
        banned = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
        assert not re.search(banned, text), name


def test_metrics_are_read_on_from_where_the_last_reading_ended(
    client: TestClient, folder: Path
) -> None:
    path = folder / "metrics.jsonl"
    first = client.get("/api/runs/demo/metrics").json()
    assert [row["step"] for row in first["rows"]] == [0, 1, 2]
    with path.open("a") as file:
        file.write('{"step": 3, "loss": NaN}\n{"step": 4')
    more = client.get(f"/api/runs/demo/metrics?offset={first['offset']}").json()
    assert more["rows"] == [{"step": 3, "loss": None}]
    with path.open("a") as file:
        file.write("}\n")
    last = client.get(f"/api/runs/demo/metrics?offset={more['offset']}").json()
    assert (last["rows"], last["reset"]) == ([{"step": 4}], False)
    path.write_text('{"step": 0}\n')  # resumed: written again
    again = client.get(f"/api/runs/demo/metrics?offset={last['offset']}").json()
    assert (again["rows"], again["reset"]) == ([{"step": 0}], True)


@pytest.mark.parametrize("pad", ["", "longer, so that no line begins where one began before"])
def test_the_page_rereads_the_metrics_of_a_resumed_run(
    client: TestClient, folder: Path, pad: str
) -> None:
    path = folder / "metrics.jsonl"

    def lines(first: int, last: int, **more: object) -> str:
        return "".join(json.dumps({"step": s, **more}) + "\n" for s in range(first, last))

    path.write_text(lines(100, 200))
    read = client.get("/api/runs/demo/metrics").json()
    path.write_text(lines(100, 150) + lines(150, 260, loss=pad))
    again = client.get(f"/api/runs/demo/metrics?offset={read['offset']}").json()
    assert again["reset"]
    assert [row["step"] for row in again["rows"]] == [*range(100, 260)]


def test_an_amended_line_of_the_same_length_is_read_again(client: TestClient, folder: Path) -> None:
    """An evaluation beside training is known after its step's line, which has kilobytes."""
    path = folder / "metrics.jsonl"
    line = '{{"step": 1, "accuracy_heldout": {}, "more": "' + "x" * 9000 + '"}}\n'
    path.write_text(line.format("null"))
    read = client.get("/api/runs/demo/metrics").json()
    path.write_text(line.format("0.75"))
    again = client.get(f"/api/runs/demo/metrics?offset={read['offset']}").json()
    assert (again["rows"][0]["accuracy_heldout"], again["reset"]) == (0.75, True)


def test_a_damaged_line_is_named(client: TestClient, folder: Path) -> None:
    tree = json.loads(a_trajectory(0, "x").to_json())
    tree["turns"][0]["parent"] = 5
    (folder / "trajectories" / "step-0001.jsonl").write_text(json.dumps(tree) + "\n")
    for what in ("audit", "template/0"):
        answer = client.get(f"{STEP}/0/{what}")
        assert (answer.status_code, answer.json()["detail"][:35]) == (
            422,
            "step-0001, line 1 is no trajectory:",
        )
    (folder / "metrics.jsonl").write_text('{"step": 1\n')
    assert client.get("/api/runs/demo/metrics").status_code == 422


def test_a_step_has_a_summary_of_each_trajectory_and_its_line(
    client: TestClient, folder: Path
) -> None:
    listed = client.get(STEP).json()["trajectories"]
    assert [one["problem"] for one in listed] == ["rows:0", "rows:0", "rows:1", "rows:1"]
    assert listed[3]["forks"] == {"history_edited": 1}
    assert (listed[3]["tokens"], listed[3]["length"], listed[3]["versions"]) == (5, 7, [0, 1])
    assert listed[1]["answer"] == ATTACK
    lines = (folder / "trajectories" / "step-0001.jsonl").read_text().splitlines()
    assert client.get(f"{STEP}/1").json() == json.loads(lines[1])
    assert client.get(f"{STEP}/2").json()["metrics"] == {"distance": None}
    audit = client.get(f"{STEP}/3/audit").json()
    assert (audit["violations"], audit["tokens_exact"]) == (0, 5)
    # A file that has changed is scanned again.
    write_jsonl(folder / "trajectories" / "step-0001.jsonl", [a_trajectory(0, "new")])
    assert [one["answer"] for one in client.get(STEP).json()["trajectories"]] == ["new"]


def test_the_files_that_have_a_problem_are_found(client: TestClient, folder: Path) -> None:
    write_jsonl(folder / "trajectories" / "eval-0001.jsonl", [Trajectory('rows:"ä"', 0)])
    write_jsonl(folder / "trajectories" / "eval-0002.jsonl", [])
    for name, files in (
        ("rows:1", ["step-0001"]),
        ("rows:", []),
        ('rows:"ä"', ["eval-0001"]),
        ("Question", []),
    ):
        found = client.get("/api/runs/demo/problem", params={"name": name}).json()
        assert found == {"files": files}, name


def test_the_answers_of_each_tool_are_counted() -> None:
    calls = [{"id": str(n), "function": {"name": name}} for n, name in enumerate("aab")]
    said = ["3", "Error: a failed: ValueError: 4", [{"type": "text", "text": "error: 5"}]]
    answers = [
        {"role": "tool", "tool_call_id": str(n), "content": text} for n, text in enumerate(said)
    ]
    others = [
        {"role": "tool", "name": "c", "content": "6"},
        {"role": "tool", "tool_call_id": "9", "content": "Write the call as JSON."},
    ]
    messages = [{"role": "assistant", "tool_calls": calls}, *answers, *others]
    found = summarise({"problem_id": "rows:1", "turns": [], "messages": messages})["tools"]
    assert found == {"a": [2, 1], "b": [1, 1], "c": [1, 0], "an unreadable call": [1, 1]}


def test_a_file_is_scanned_once(folder: Path) -> None:
    run = ViewedRun(folder, "demo")
    first = run.index("step-0001")
    assert run.line("step-0001", 2).startswith(b'{"problem_id":"rows:1"')
    assert run.index("step-0001") is first


@pytest.mark.parametrize(
    ("text", "found"),
    [("ANSWER is", [3]), ("question", [0, 1, 2, 3]), ('"quoted" ärger', [2]), ("reward", [])],
)
def test_search_finds_what_was_said_in_any_case(
    client: TestClient, text: str, found: list[int]
) -> None:
    assert client.get(f"{STEP}/search", params={"q": text}).json() == {"found": found}


def test_a_line_that_is_no_trajectory_is_named(client: TestClient, folder: Path) -> None:
    with (folder / "trajectories" / "step-0001.jsonl").open("a") as file:
        file.write("{}\n")
    answer = client.get(STEP)
    assert answer.status_code == 422
    assert "step-0001.jsonl, line 5 is no trajectory" in answer.json()["detail"]


def test_tokens_have_text_and_bytes(client: TestClient, folder: Path) -> None:
    texts = client.get(f"{STEP}/3/tokens").json()
    assert texts["1"] == ["a", "61", False]
    assert texts["2"] == [" b", "20 62", False]
    assert texts["3"] == ["\n", "0a", False]
    assert texts["5"] == ["\\xc3", "c3", False], "half of a character"
    assert texts["7"] == ["<|end|>", "3c 7c 65 6e 64 7c 3e", True]
    (folder / "checkpoints").rename(folder / "gone")
    assert find_tokenizer(folder, {"model.path": "nowhere/nothing-of-this-name"}) is None
    assert texts_of(read_vocabulary(None), [1]) == {}


def test_trained_tokens_have_their_values(client: TestClient, folder: Path) -> None:
    values = client.get(f"{STEP}/3/values").json()
    assert (values["turn"], values["at"], values["staleness"]) == ([2], [0], [1])
    assert values["ratio"] == [0.25]
    assert client.get(f"{STEP}/0/values").json()["turn"] == []
    (folder / "training" / "step-0001.safetensors").unlink()
    assert client.get(f"{STEP}/3/values").json() == {}


def test_turns_have_their_times(client: TestClient, folder: Path) -> None:
    assert client.get(f"{STEP}/timeline").json() == {"calls": []}
    (folder / "timeline").mkdir()
    calls: list[list[TurnTimes]] = [[], [TurnTimes(0, 1.0, None, 3.0, "worker-0")]]
    lines = "".join(f"{json.dumps(each)}\n" for each in calls)
    (folder / "timeline" / "step-0001.jsonl").write_text(lines)
    times = [0, 1.0, None, 3.0, "worker-0", None, None]
    assert client.get(f"{STEP}/timeline").json()["calls"] == [[], [times]]


def test_tokens_of_pieces_have_their_spaces_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    model = {"vocab": [["<unk>", 0.0], ["\u2581the", -1.0], ["<0xC3>", -2.0]]}
    path.write_text(json.dumps({"model": model, "decoder": {"type": "Metaspace"}}))
    texts = texts_of(read_vocabulary(path), [1, 2, 9])
    assert texts == {"1": [" the", "20 74 68 65", False], "2": ["\\xc3", "c3", False]}


def test_names_are_unique_in_all_modules_as_an_export_joins_them() -> None:
    declared = re.compile(r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", re.M)
    files = static_files()
    names = [n for name in files if name.endswith(".js") for n in declared.findall(files[name])]
    assert len(names) > 40
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("trajectory", [None, 1])
def test_an_exported_page_needs_nothing_else(
    folder: Path, tmp_path: Path, trajectory: int | None
) -> None:
    page = tmp_path / "page.html"
    chosen = [] if trajectory is None else ["--trajectory", str(trajectory)]
    done = CliRunner().invoke(commands, ["view", str(folder), "--export", str(page), *chosen])
    assert done.exit_code == 0, done.output
    html = page.read_text()
    script = html.partition('<script type="module">')[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html
    assert not re.search(r"^(import|export) ", script, re.M)
    assert not re.search(r'(?:src|href)="/', html)
    assert ATTACK not in html
    assert html.count("<script") == 2
    embedded = html.partition('id="embedded">')[2].partition("</script>")[0]
    data = json.loads(embedded)
    assert data["answers"][f"{STEP}/1"]["messages"][1]["content"] == ATTACK
    assert (f"{STEP}/0" in data["answers"]) == (trajectory is None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "there is no run in nowhere"),
        (["RUN", "--export", "x.html", "--step", "7"], "no trajectories of step 7"),
        (["RUN", "--export", "x.html", "--trajectory", "9"], "step-0001 has 4 trajectories"),
        (["RUN", "--export", "nowhere/x.html"], "nowhere/x.html"),
    ],
)
def test_mistakes_are_one_sentence(folder: Path, arguments: list[str], said: str) -> None:
    words = [str(folder) if word == "RUN" else word for word in arguments]
    done = CliRunner().invoke(commands, ["view", *words])
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.stderr.split())


def test_the_prompts_and_answers_of_judges_are_there(client: TestClient, folder: Path) -> None:
    key = "a" * 64
    verdict = {"judge": "style", "score": 0.5, "why": "So so.", "request": key}
    judged = a_trajectory(0, "Plain.")
    judged.set_outcome(verdicts=[verdict, verdict | {"request": "b" * 64}])
    write_jsonl(folder / "trajectories" / "step-0002.jsonl", [judged])
    entry = {"key": key, "judge": "style", "messages": [{"role": "user", "content": ATTACK}]}
    lines = [json.dumps(entry | {"answer": "{}"}), json.dumps(entry | {"key": "c" * 64})]
    torn = lines[0][:80]  # of a run that was killed and resumed
    (folder / "judge.jsonl").write_text(
        "".join(f"{line}\n" for line in [torn + torn, *lines, torn])
    )
    found = client.get("/api/runs/demo/files/step-0002/0/judgements").json()
    assert {name: one["answer"] for name, one in found.items()} == {key: "{}"}
    assert client.get(f"{STEP}/0/judgements").json() == {}
    shown = CliRunner().invoke(commands, ["show", str(folder), "0", "--step", "2"]).output
    assert "style 0.5: So so." in shown
    page = folder / "page.html"
    assert CliRunner().invoke(commands, ["view", str(folder), "--export", str(page)]).exit_code == 0
    assert ATTACK not in page.read_text()


def test_a_run_that_no_process_plays_has_ended(folder: Path) -> None:
    assert not ViewedRun(folder, "demo").may_be_running()
    elsewhere = folder / "logs" / "stacks" / "another-host-1.txt"
    elsewhere.parent.mkdir(parents=True)
    elsewhere.write_text("driver\nstarted 5\n")
    assert ViewedRun(folder, "demo").may_be_running(), "another machine's may live"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ("[0.9998, 0.9999, 1, 1.0001]", ["0.9998", "0.9999", "1", "1.0001"]),
        ("[1000.2, 1000.4]", ["1000.2", "1000.4"]),
        ("ticks(0, 1, false)", ["0", "0.5", "1"]),
        ("[1e-5, 1e-4]", ["1.0e-5", "1.0e-4"]),
    ],
)
def test_the_ticks_of_an_axis_have_labels_that_differ(values: str, labels: list[str]) -> None:
    chart = Path(server.__file__).with_name("static") / "chart.js"
    script = f"import {{labelsOf, ticks}} from {json.dumps(str(chart))};"
    script += f"console.log(JSON.stringify(labelsOf({values})))"
    command = ["node", "--input-type=module", "-e", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    shown = json.loads(done.stdout)
    assert len(set(shown)) == len(shown)
    assert [label for label in labels if label not in shown] == []
