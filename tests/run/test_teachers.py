"""Teachers that score trajectories: servers over HTTP, models in the ranks, and what is refused."""

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from tests.simulated import SimulatedEngine
from tests.training.test_samples import config, group
from turnwise.config import Config, SamplingConfig, TeacherConfig
from turnwise.core import endpoint
from turnwise.engine import Request, generate
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollouts import Group, Problem
from turnwise.run import teachers as teachers_module
from turnwise.run.runtime import Runtime, TrainingStep
from turnwise.run.teachers import Teachers, TeacherServer, check_teachers
from turnwise.trajectory import Image, PlacedImage, Prompt, Trajectory

Answer = Callable[[dict[str, Any]], Any]


class Server:
    """A server of completions: the log-prob of a token is minus its number."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.failures: list[int] = []
        """Statuses of the next answers."""
        self.answer: Answer = self.echo

    def text(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))

    def echo(self, body: dict[str, Any]) -> Any:
        ids = [*body["prompt"], 5]  # and the one that it samples
        logprobs = [None, *(-float(token) for token in ids[1:])]
        tokens = [self.text(token) for token in ids]
        return {"choices": [{"logprobs": {"tokens": tokens, "token_logprobs": logprobs}}]}

    async def completions(self, request: web.Request) -> web.Response:
        self.headers = dict(request.headers)
        body = await request.json()
        self.asked.append(body)
        if self.failures:
            return web.Response(status=self.failures.pop(0), text="not now")
        return web.json_response(self.answer(body))


@pytest.fixture
async def server(tokenizer: Any) -> AsyncIterator[Server]:
    made = Server(tokenizer)
    app = web.Application()
    app.router.add_post("/v1/completions", made.completions)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield made
    await runner.cleanup()


@pytest.fixture
def teacher(
    server: Server, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Awaitable[TeacherServer]]:
    """Starts a teacher at the server, which does not wait long before it repeats a request."""
    monkeypatch.setattr(endpoint, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(teachers_module, "_RETRIES", 2)

    async def start(**keys: Any) -> TeacherServer:
        settings = config(rollout={"stall_timeout": 5.0})
        made = TeacherServer(
            settings, "algorithm.teacher", TeacherConfig(url=server.url, **keys), tokenizer
        )
        await made.start()
        return made

    return start


async def test_a_server_scores_by_echoed_prompts(server: Server, teacher: Any) -> None:
    made = await teacher(model="big")
    assert await made.score(Prompt([3, 4, 7])) == [None, -4.0, -7.0]
    body = server.asked[-1]
    assert (body["prompt"], body["model"], body["max_tokens"]) == ([3, 4, 7], "big", 1)
    assert server.asked[0]["prompt"] != [3, 4, 7]  # texts of tokens are compared first


async def test_the_servers_key_is_that_of_a_variable(
    server: Server, teacher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "secret")
    await teacher(api_key_variable="TEACHER_KEY")
    assert server.headers["Authorization"] == "Bearer secret"
    with pytest.raises(InputError, match=r"algorithm.teacher: .* variable NO_SUCH is not set"):
        await teacher(api_key_variable="NO_SUCH")


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_server_is_asked_until_the_deadline(
    server: Server, teacher: Any, status: int
) -> None:
    made = await teacher()
    server.failures = [status] * 5
    assert await made.score(Prompt([3, 4])) == [None, -4.0]


async def test_a_server_that_fails_is_asked_again(server: Server, teacher: Any) -> None:
    made = await teacher()
    server.failures = [500] * 2
    assert await made.score(Prompt([3, 4])) == [None, -4.0]
    server.failures = [500] * 3
    with pytest.raises(TrajectoryError, match="answered 500: not now") as caught:
        await made.score(Prompt([3, 4]))
    assert caught.value.reason == "teacher_error"


async def test_a_refused_sequence_is_not_asked_again(server: Server, teacher: Any) -> None:
    made = await teacher()
    server.failures = [400]
    with pytest.raises(TrajectoryError, match="answered 400"):
        await made.score(Prompt([3, 4]))
    assert server.failures == []
    assert await made.score(Prompt([3, 4])) == [None, -4.0]


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ([], "gave no log-probs of all 2 tokens"),
        ([{"logprobs": None}], "gave no log-probs of all 2 tokens"),
        ([{"logprobs": {"tokens": ["a"], "token_logprobs": [None]}}], "of all 2 tokens"),
        (
            [{"logprobs": {"tokens": ["a", "b"], "token_logprobs": [None, "much"]}}],
            "sent a wrong answer",
        ),
        ("none", "sent a wrong answer"),
    ],
)
async def test_an_answer_without_a_log_prob_of_every_token_is_refused(
    server: Server, teacher: Any, choices: Any, said: str
) -> None:
    made = await teacher()
    server.answer = lambda _: {"choices": choices}
    with pytest.raises(TrajectoryError, match=said):
        await made.score(Prompt([3, 4]))


async def test_the_refusal_names_the_first_token_that_differs(server: Server, teacher: Any) -> None:
    own = server.text
    made = await teacher()
    server.text = lambda token: "zebra" if token == 7 else own(token)  # type: ignore[method-assign]
    said = f"token 7 is {own(7)!r} in the policy's, and 'zebra' in the teacher's"
    with pytest.raises(InputError, match=re.escape(said)):
        await made.score(Prompt([3, 4, 7]))
    server.text = lambda token: f"{token}"  # type: ignore[method-assign]
    with pytest.raises(InputError, match="has another tokenizer than the policy"):
        await teacher()  # before anything is sampled


async def test_a_server_that_cannot_teach_fails_before_sampling(
    server: Server, teacher: Any
) -> None:
    server.answer = lambda _: {"choices": [{"text": "hello", "logprobs": None}]}
    with pytest.raises(InputError, match=r"algorithm.teacher: .* gave no log-probs of all"):
        await teacher()
    server.url = "http://127.0.0.1:9/v1"
    with pytest.raises(InputError, match=r"cannot be reached.*: it cannot teach"):
        await teacher()


def scored_by(server: Server, tokenizer: Any) -> tuple[Config, Teachers]:
    made = config(algorithm={"advantage": "none", "teacher": {"url": server.url}})
    return made, Teachers(made, tokenizer, 0.0)


def taught(trajectory: Trajectory) -> list[list[float]]:
    return [branch.gather("teacher").tolist() for branch in trajectory.samples()]


async def test_a_group_is_scored_when_it_ends_over_its_tool_turns(
    server: Server, tokenizer: Any
) -> None:
    _, teachers = scored_by(server, tokenizer)
    await teachers.start()

    async def run_group(problem: Problem, tag: str) -> Group:
        return group(0.0, 1.0)

    runtime: Any = SimpleNamespace(teachers=teachers, group_runner=lambda sampling: run_group)
    scored = Runtime.training_runner(runtime, SamplingConfig())
    made = await scored(Problem("p", {}), "tag")
    await teachers.score(made)
    await teachers.stop()
    for trajectory in made.trajectories:  # 1, 2 are the prompt's, 6 a tool's
        assert taught(trajectory) == [[0.0, 0.0, -3.0, -4.0, -5.0, 0.0, -7.0, -8.0, -9.0]]
    assert [body["prompt"] for body in server.asked[1:]] == [[*range(1, 10)]] * 2  # each once
    assert made.seconds["teacher"] > 0
    again = Group.from_dict(json.loads(json.dumps(made.to_dict())))  # of a checkpoint
    assert taught(again.trajectories[0]) == taught(made.trajectories[0])


async def test_engines_score_a_sequence_by_one_request() -> None:
    made = config(algorithm={"teacher": {"model": "t", "engines": 1}})
    teachers = Teachers(made, None, 0.0)  # type: ignore[arg-type]
    (teacher,) = teachers._started
    engine = SimulatedEngine(name="teacher-0", seed=1)
    teacher._manager = SimpleNamespace(scheduler=engine)  # type: ignore[union-attr, assignment]
    scored = group(0.0, 1.0)
    await teachers.score(scored)
    sampling = SamplingConfig(max_tokens=1, prompt_logprobs=True)
    done = await generate(engine, Request(list(range(1, 10)), sampling, "again"))
    assert done.prompt_logprobs is not None
    expected = [p if at in {2, 3, 4, 6, 7, 8} else 0.0 for at, p in enumerate(done.prompt_logprobs)]
    for trajectory in scored.trajectories:
        assert taught(trajectory) == [pytest.approx(expected)]


SEEN = Prompt([1, 9, 9, 2, 5], [PlacedImage(Image.of(b"GIF89a", "gif", 28, 28), 1, 2)])


async def test_engines_see_the_images_of_a_sequence() -> None:
    teachers = Teachers(config(algorithm={"teacher": {"model": "t", "engines": 1}}), None, 0.0)  # type: ignore[arg-type]
    (teacher,) = teachers._started
    engine = SimulatedEngine(name="teacher-0", seed=1)
    teacher._manager = SimpleNamespace(scheduler=engine)  # type: ignore[union-attr, assignment]
    scored = group(0.0)
    (trajectory,) = scored.trajectories
    trajectory.add_turn(SEEN, [6, 7], [-1.0, -1.0], [0, 0], "stop")
    asked = list[Request]()
    own = engine.stream
    engine.stream = lambda request: asked.append(request) or own(request)  # type: ignore[assignment, method-assign, func-returns-value]
    await teachers.score(scored)
    assert not scored.dropped
    assert {request.prompt.images for request in asked} == {(), SEEN.images}


async def test_a_server_sees_no_images(teacher: Any) -> None:
    made = await teacher()
    with pytest.raises(TrajectoryError, match="scores no images") as caught:
        await made.score(SEEN)
    assert caught.value.reason == "teacher_error"


async def test_a_trajectory_without_a_score_is_dropped_and_counted(
    server: Server, tokenizer: Any
) -> None:
    _, teachers = scored_by(server, tokenizer)
    await teachers.start()
    server.failures = [413]
    made = group(0.0, 1.0)
    await teachers.score(made)
    await teachers.stop()
    assert (len(made.trajectories), made.dropped) == (1, {"teacher_error": 1})
    assert made.dropped_tokens == {"teacher_error": 6}
    assert "answered 413: not now" in made.causes["teacher_error"]


async def test_a_step_scores_what_no_teacher_has_scored(server: Server, tokenizer: Any) -> None:
    """Groups of pipelines, and of a checkpoint of a run without a teacher."""
    made, teachers = scored_by(server, tokenizer)
    runtime: Any = SimpleNamespace(
        manager=None, policy=SimpleNamespace(version=5, dtype="float32"), teachers=teachers
    )
    batch = await TrainingStep(made, runtime).make_samples([group(1.0)])
    (sample,) = batch.samples
    assert sample.streams["teacher"].tolist() == [0, 0, -3, -4, -5, 0, -7, -8, -9]


def test_teachers_of_environments_that_are_equal_are_one(tokenizer: Any) -> None:
    entry = {"environment": "a:B", "data": {"path": "d"}}
    own, heavy = (
        entry | {"teacher": {"url": "http://other/v1", "weight": weight}} for weight in (1, 2)
    )
    made = Teachers(
        config(
            environment=None,
            data={},
            environments={"one": entry, "two": entry, "three": own, "four": heavy},
            algorithm={"teacher": {"url": "http://host/v1"}},
        ),
        tokenizer,
        0.0,
    )
    assert made._outside["one"] is made._outside["two"]
    assert made._outside["three"] is made._outside["four"]
    assert made._outside["three"] is not made._outside["one"]
    assert len(made._started) == 2
    who = [str(teacher._endpoint) for teacher in made._started]  # type: ignore[union-attr]
    assert who[0] == "algorithm.teacher: the teacher at http://host/v1"
    assert who[1] == "environments.three.teacher: the teacher at http://other/v1"


def test_a_model_with_another_tokenizer_is_refused_at_once(
    tokenizer: Any, model_path: str, tmp_path: Path
) -> None:
    check_teachers(config(algorithm={"teacher": {"model": model_path}}), tokenizer)
    tokenizer.save_pretrained(tmp_path)
    tree = json.loads((tmp_path / "tokenizer.json").read_text())
    words = {index: word for word, index in tree["model"]["vocab"].items()}
    first, second = 40, 41
    tree["model"]["vocab"] |= {words[first]: second, words[second]: first}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    changed = config(algorithm={"teacher": {"model": str(tmp_path)}})
    with pytest.raises(InputError, match=r"algorithm.teacher: .* token 40 is .* in the policy's"):
        check_teachers(changed, tokenizer)
    with pytest.raises(InputError, match="/no/such has no tokenizer"):
        check_teachers(config(algorithm={"teacher": {"model": "/no/such"}}), tokenizer)
