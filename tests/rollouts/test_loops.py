"""Agent loops and the runner on the real engine, which is made to say what a test needs."""

import asyncio
import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from turnwise.config import Config, SamplingConfig
from turnwise.errors import InputError, StepError
from turnwise.rollouts import Group, Problem, Runner, check_failures
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.trajectory import ChatTemplate, Trajectory, audit


def call(name: str, /, **arguments: Any) -> str:
    text = str(arguments).replace("'", '"')
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


CROWD = asyncio.Barrier(16)


class Desk:
    """An environment with a tool of each kind; the reward is the row's."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.problem = [{"role": "user", "content": row["question"]}]
        self.tools = [self.double, self.meet, self.crowd, self.nap, self.fail]
        self.row = row
        self.pair = asyncio.Barrier(2)

    def double(self, x: int) -> int:
        """Double a number.

        Args:
            x: The number.
        """
        return 2 * x

    async def meet(self, name: str) -> str:
        """Wait until two calls of this trajectory are here.

        Args:
            name: Who comes.
        """
        await self.pair.wait()
        return f"{name} met"

    async def crowd(self) -> str:
        """Wait until sixteen trajectories are here."""
        await CROWD.wait()
        return "all here"

    async def nap(self) -> None:
        """Sleep for a minute."""
        await asyncio.sleep(60)

    def fail(self) -> None:
        """Fail."""
        raise RuntimeError("broken")

    def reward(self, trajectory: Trajectory) -> float:
        if self.row.get("reward") == "error":
            raise ValueError("cannot judge")
        return float(self.row.get("reward", 1.0))


class SlowDesk(Desk):
    async def reward(self, trajectory: Trajectory) -> float:  # type: ignore[override]
        await asyncio.sleep(60)
        return 0.0


class LoudDesk(Desk):
    def __init__(self, row: dict[str, Any]) -> None:
        super().__init__(row)
        self.tools = [self.double, self.nap, self.shout]

    def shout(self, text: str) -> str:
        """Say it louder.

        Args:
            text: What to say.
        """
        return f"{text}!"


class UntypedDesk(Desk):
    def __init__(self, row: dict[str, Any]) -> None:
        super().__init__(row)

        def tool(x):  # type: ignore[no-untyped-def]
            """Do something.

            Args:
                x: Something.
            """

        self.tools = [tool]


class BrokenLoop:
    async def run(self, environment: Any, context: Any) -> None:
        await context.sample(context.template.render(environment.problem))
        raise KeyError("oops")


@pytest.fixture(scope="module")
def attempt(
    engine: WorkerHandle, make_config: Callable[..., Config], tokenizer: Any, template: ChatTemplate
) -> Callable[..., Any]:
    async def run(
        script: list[str],
        environment: str = "Desk",
        row: dict[str, Any] | None = None,
        n: int = 1,
        sampling: dict[str, Any] | None = None,
        max_length: int = 512,
        chat_template: str | None = None,
        **rollout: Any,
    ) -> Group:
        if chat_template is not None:  # those below show no tools
            rollout = {"tools_in_prompt": False, **rollout}
        config = make_config(
            environment=environment if ":" in environment else f"{__name__}:{environment}",
            rollout={"loop": "tool_calling", "tool_timeout": 300, **rollout},
            model={**make_config().model.model_dump(), "max_length": max_length},
        )
        turns = [template.encode(turn) for turn in script]
        values = {"n": n, "max_tokens": 200, **(sampling or {})}
        chosen = SamplingConfig(**values, logits_processor_args={"script": turns})
        its_tokenizer = copy.deepcopy(tokenizer)
        its_tokenizer.chat_template = chat_template or tokenizer.chat_template
        runner = Runner(config, its_tokenizer)
        problem = Problem("desk:1", {"question": "Go.", **(row or {})})
        return await runner.run_group(engine, problem, chosen, f"t{time.perf_counter_ns()}")

    return run


END = "<|im_end|>"


async def test_calls_of_one_turn_run_together_and_keep_their_order(
    attempt: Callable[..., Any], template: ChatTemplate
) -> None:
    said = [
        call("meet", name="Ada") + call("double", x=21) + call("meet", name="Bob") + END,
        "The answer is 42." + END,
    ]
    group = await attempt(said)
    (trajectory,) = group.trajectories
    assert trajectory.status == "completed"
    assert trajectory.reward == 1.0
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == [
        "Ada met",
        "42",
        "Bob met",
    ]
    assert trajectory.final_text == "The answer is 42."
    assert trajectory.events == {"tool_call": 3}
    sampled = [template.encode(turn) for turn in said]
    assert [turn.completion_token_ids for turn in trajectory.turns] == sampled
    first, last = group.calls[0]
    assert first.tools > 0
    assert last.tools == 0


@pytest.mark.parametrize("calls", [1, 2, 3])
async def test_the_ids_are_those_that_the_template_renders(
    attempt: Callable[..., Any], template: ChatTemplate, calls: int
) -> None:
    """Answers of parallel calls too, which may share a turn."""
    said = "\n".join(call("double", x=x) for x in range(calls))
    group = await attempt([said + END, "8" + END])
    (trajectory,) = group.trajectories
    from turnwise.tools.toolbox import Toolbox

    desk = Desk({"question": "Go."})
    schemas = Toolbox(desk.tools, timeout=1, max_chars=10).schemas
    rendered = template.render(trajectory.messages, tools=schemas, add_generation_prompt=False)
    (branch,) = trajectory.branches()
    length = len(branch.token_ids)
    assert branch.token_ids == rendered[:length]
    assert template.decode(rendered[length:]).strip() == ""
    assert len(branch.logprobs) == length
    assert sum(branch.response_mask) == sum(
        len(turn.completion_token_ids) for turn in trajectory.turns
    )


@pytest.mark.parametrize(
    ("said", "answer", "event"),
    [
        (call("undo", x=1), "there is no tool 'undo'", "tool_unknown"),
        (call("double", x="two"), "x: Input should be a valid integer", "tool_bad_arguments"),
        (call("fail"), "RuntimeError: broken", "tool_error"),
        (call("nap"), "did not answer within 0.2 s", "tool_timeout"),
        ("<tool_call>\n{nonsense\n</tool_call>", "cannot be read", "tool_malformed"),
        (call("double", x=10**80), "0\n[1 more characters left out]", "tool_truncated"),
    ],
)
async def test_a_bad_call_gets_an_answer_and_the_model_goes_on(
    attempt: Callable[..., Any], said: str, answer: str, event: str
) -> None:
    seconds = 0.2 if event == "tool_timeout" else 300
    group = await attempt([said + END, "I see." + END], tool_timeout=seconds, tool_max_chars=80)
    (trajectory,) = group.trajectories
    (result,) = [m["content"] for m in trajectory.messages if m["role"] == "tool"]
    assert answer in result
    assert trajectory.events[event] == 1
    assert trajectory.final_text == "I see."


async def test_limits_end_a_trajectory_with_a_status_and_keep_it(
    attempt: Callable[..., Any],
) -> None:
    endless = [call("double", x=i) + END for i in range(10)]
    (many,) = (await attempt(endless, max_turns=2)).trajectories
    assert (many.status, len(many.turns), many.events["tool_call"]) == ("max_turns", 2, 2)
    (cut,) = (await attempt(["a" * 60], sampling={"max_tokens": 5})).trajectories
    assert (cut.status, cut.sampled_tokens) == ("length", 5)
    (full,) = (await attempt(endless, max_length=480)).trajectories
    assert full.status in ("context_full", "length")
    assert all(len(branch.token_ids) <= 480 for branch in full.branches())


async def test_earlier_results_are_dropped_near_the_limit(
    attempt: Callable[..., Any], template: ChatTemplate
) -> None:
    """The rules: test_context_window.py; here with real log-probs and the prefix cache."""
    said = [*(call("shout", text=f"{n}" + " and so on" * 8) + END for n in range(3)), "Done." + END]
    context = {"compact": "drop_results", "limit": 320}
    (trajectory,) = (await attempt(said, "LoudDesk", context=context)).trajectories
    assert (trajectory.status, trajectory.final_text) == ("completed", "Done.")
    assert [t.completion_token_ids for t in trajectory.turns] == [template.encode(t) for t in said]
    assert trajectory.events["compacted"] > 0
    reasons = [turn.fork_reason for turn in trajectory.turns if turn.fork_reason]
    assert reasons == ["compacted"] * trajectory.events["compacted"]
    assert audit(trajectory).violations == 0


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("reward_error", {"row": {"reward": "error"}}),
        ("loop_error", {"loop": "tests.rollouts.test_loops:BrokenLoop"}),
        ("trajectory_timeout", {"environment": "SlowDesk", "trajectory_timeout": 0.5}),
    ],
)
async def test_a_failure_is_counted_under_its_reason(
    attempt: Callable[..., Any], reason: str, options: dict[str, Any]
) -> None:
    group = await attempt(["Hello." + END], n=3, **options)
    assert group.trajectories == []
    assert group.dropped == {reason: 3}
    with pytest.raises(StepError, match=f"3 of 3 trajectories failed \\(3 {reason}: "):
        check_failures([group], 0.5, "rollouts")


def test_a_few_failures_do_not_end_a_step() -> None:
    group = Group("p", [Trajectory("p"), Trajectory("p")])
    group.dropped["reward_error"] = 2
    assert check_failures([group], 0.5, "rollouts") == {"reward_error": 2}


async def test_one_group_runs_side_by_side(attempt: Callable[..., Any]) -> None:
    """As coroutines around one `AsyncLLM`."""
    group = await attempt([call("crowd") + END, "Done." + END], n=16)
    assert [t.sample_index for t in group.trajectories] == list(range(16))
    assert {t.messages[2]["content"] for t in group.trajectories} == {"all here"}


async def test_a_single_turn_offers_no_tools(
    attempt: Callable[..., Any], template: ChatTemplate
) -> None:
    (trajectory,) = (await attempt(["Yes." + END], loop="single_turn")).trajectories
    (turn,) = trajectory.turns
    assert turn.added_token_ids == template.render([{"role": "user", "content": "Go."}])
    assert (trajectory.final_text, trajectory.status) == ("Yes.", "completed")


async def test_interleaved_results_stand_in_the_turn_untrained(
    attempt: Callable[..., Any], template: ChatTemplate
) -> None:
    said = ["I double: " + call("double", x=4), " and again " + call("double", x=8), " 16." + END]
    (trajectory,) = (await attempt(said, loop="interleaved")).trajectories
    assert trajectory.status == "completed"
    assert trajectory.events == {"tool_call": 2}
    texts = [template.decode(turn.completion_token_ids) for turn in trajectory.turns]
    assert texts == [*said[:2], " 16."]
    between = [template.decode(turn.added_token_ids) for turn in trajectory.turns[1:]]
    shown = [f"\n<tool_response>\n{n}\n</tool_response>\n" for n in (8, 16)]
    assert between == shown
    assert trajectory.final_text == said[0] + shown[0] + said[1] + shown[1] + " 16."
    assert [m["role"] for m in trajectory.messages] == ["user", "assistant"]
    (branch,) = trajectory.branches()
    assert sum(branch.response_mask) == sum(len(template.encode(turn)) for turn in said)


async def test_prompt_logprobs_are_kept_beside_their_ids(
    attempt: Callable[..., Any],
) -> None:
    said = [call("double", x=4) + END, "8" + END]
    (trajectory,) = (await attempt(said, sampling={"prompt_logprobs": True})).trajectories
    for turn in trajectory.turns:
        assert turn.added_logprobs is not None
        assert len(turn.added_logprobs) == len(turn.added_token_ids)
    assert trajectory.turns[0].added_logprobs[0] is None
    assert all(value is not None for value in trajectory.turns[1].added_logprobs)


@pytest.mark.parametrize("call", ["<tool_call>{</tool_call>", "2 + 2</tool_call>"])
async def test_an_interleaved_call_that_fails_is_answered_too(
    attempt: Callable[..., Any], call: str
) -> None:
    said = [call, " sorry." + END]
    (trajectory,) = (await attempt(said, loop="interleaved")).trajectories
    assert trajectory.events == {"tool_malformed": 1}
    assert "cannot be read" in trajectory.final_text


JSON_CALL = '<do>{"name": "double", "arguments": {"x": 4}}</do>'


@pytest.mark.parametrize(
    ("said", "options", "event", "shown"),
    [
        ("so " + JSON_CALL, {}, "tool_call", "8"),
        ("so <do>double(4)</do>", {}, "tool_call", "8"),
        ("<do> double(x=4) </do>", {}, "tool_call", "8"),
        ("<do>double(4, 5)</do>", {}, "tool_malformed", "write one JSON object"),
        ("<do>{'name'}</do>", {}, "tool_malformed", "write one JSON object"),
        ("4</do>", {}, "tool_malformed", "between <do> and </do>"),
        ("<do>x</do>", {"call_tool": "nap"}, "rollout.call_tool: nap must have one", None),
        ("<do>x</do>", {"call_tool": "undo"}, "rollout.call_tool: there is no tool 'undo'", None),
        ("<do>\n4 < 5 </do>", {"call_tool": "shout"}, "tool_call", "\n4 < 5 !"),
    ],
)
async def test_own_tags_mark_a_call(
    attempt: Callable[..., Any],
    template: ChatTemplate,
    said: str,
    options: dict[str, Any],
    event: str,
    shown: str | None,
) -> None:
    """Tags of the configuration, around JSON or around the text for one tool."""
    tags = {
        "environment": "LoudDesk",
        "loop": "interleaved",
        "call_start": "<do>",
        "call_end": "</do>",
        **options,
    }
    if shown is None:
        with pytest.raises(InputError, match=event):
            await attempt([said], **tags)
        return
    (trajectory,) = (await attempt([said, " done." + END], **tags)).trajectories
    assert trajectory.events == {event: 1}
    first, second = trajectory.turns
    assert first.completion_token_ids == template.encode(said)
    assert shown in template.decode(second.added_token_ids)
    assert "double" not in template.decode(first.added_token_ids)  # the template offers no tools
    assert trajectory.final_text.startswith(said)
    assert trajectory.final_text.endswith(" done.")
    (branch,) = trajectory.branches()
    assert sum(branch.response_mask) == sum(len(template.encode(t)) for t in (said, " done." + END))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"call_start": "<do>"}, "call_start and call_end belong together"),
        ({"call_tool": "run"}, "set call_start"),
        ({"call_start": "<", "call_end": ">", "loop": "single_turn"}, "only to loop interl"),
    ],
)
def test_tags_that_do_not_fit_are_refused(
    make_config: Callable[..., Config], keys: dict[str, str], message: str
) -> None:
    """Before anything starts."""
    with pytest.raises(InputError, match=message):
        make_config(rollout={"loop": "interleaved", **keys})


CHAT = (
    "{%% for m in messages %%}<|im_start|>{{ m.role }}\n%s<|im_end|>\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)
FORGETS_REASONING = CHAT % "{{ m.content.split('</think>')[-1] }}"
HIDES_ANSWERS = CHAT % "{{ m.content if m.role != 'assistant' or loop.last else '...' }}"
HIDES_RESULTS = CHAT % "{{ m.content if m.role != 'tool' else '...' }}"
THOUGHTS = ["<think>hm</think>" + call("double", x=4) + END, "It is 8." + END]


@pytest.mark.parametrize(
    ("history", "chat_template", "fork_reason"),
    [
        ("exact", FORGETS_REASONING, None),
        ("template", FORGETS_REASONING, "history_rewritten"),
        ("template", None, None),
        ("exact", HIDES_ANSWERS, "unlike_placeholder"),
    ],
)
async def test_a_rewritten_history_branches_only_on_request(
    attempt: Callable[..., Any], history: str, chat_template: str | None, fork_reason: str | None
) -> None:
    said = THOUGHTS if chat_template else [call("double", x=4) + END]
    options = {"chat_template": chat_template, "history": history, "max_turns": 2}
    group = await attempt(said, **options)
    (trajectory,) = group.trajectories
    first, second = trajectory.turns
    assert (first.fork_reason, second.fork_reason) == (None, fork_reason)
    assert len(trajectory.branches()) == (1 if fork_reason is None else 2)
    assert trajectory.events["tool_call"] >= 1  # the second turn is free to call again
    report = audit(trajectory)
    assert (report.percent, report.tokens_exact) == (100.0, trajectory.sampled_tokens)


async def test_a_result_hidden_by_the_template_drops_the_trajectory(
    attempt: Callable[..., Any],
) -> None:
    group = await attempt(THOUGHTS, chat_template=HIDES_RESULTS)
    assert group.trajectories == []
    assert group.dropped == {"message_dropped": 1}
    assert group.dropped_tokens["message_dropped"] > 0
    assert "the template leaves out, or moves," in group.causes["message_dropped"]


async def test_tools_that_the_template_leaves_out_end_the_run(
    attempt: Callable[..., Any],
) -> None:
    for loop in ("tool_calling", "interleaved"):
        with pytest.raises(InputError, match=r"leaves out the tools.*tools_in_prompt to fal"):
            await attempt(THOUGHTS, chat_template=HIDES_ANSWERS, tools_in_prompt=True, loop=loop)


async def test_tools_described_by_hand_are_not_shown_by_the_template(
    attempt: Callable[..., Any], template: ChatTemplate
) -> None:
    said = [call("double", x=4) + END, "It is 8." + END]
    shown, by_hand = [
        (await attempt(said, tools_in_prompt=in_prompt)).trajectories[0]
        for in_prompt in (True, False)
    ]
    prompts = [template.decode_all(t.prompt_token_ids(1)) for t in (shown, by_hand)]
    assert ["Double a number" in prompt for prompt in prompts] == [True, False]
    assert by_hand.events == {"tool_call": 1}
    assert by_hand.turns[1].fork_reason is None
    assert "<tool_response>\n8\n" in prompts[1]


async def test_a_long_result_does_not_hold_up_the_event_loop(
    attempt: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    render = ChatTemplate.render_text

    def watched(self: ChatTemplate, *args: Any, **options: Any) -> str:
        threads.append(threading.current_thread().name)
        return render(self, *args, **options)

    monkeypatch.setattr(ChatTemplate, "render_text", watched)
    await attempt(["Yes." + END], loop="single_turn")
    assert set(threads) == {"MainThread"}
    threads.clear()
    long = {"question": "word " * 4000}
    group = await attempt(["No." + END], loop="single_turn", row=long, max_length=512)
    assert group.left_out
    assert set(threads) > set()
    assert "MainThread" not in threads


def test_a_check_before_the_run_names_the_row(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    long = {"question": "word " * 1000}
    runner = Runner(make_config(environment="tests.rollouts.test_loops:Desk"), tokenizer)
    with pytest.raises(
        InputError, match=r"rows\.jsonl:2: .*KeyError: 'question'.*the row has: text"
    ):
        runner.check(Problem("rows.jsonl:2", {"text": "x"}))
    with pytest.raises(InputError, match=r"rows\.jsonl:3: its prompt of \d+ tokens does not fit"):
        runner.check(Problem("rows.jsonl:3", long))
    untyped = Runner(make_config(environment="tests.rollouts.test_loops:UntypedDesk"), tokenizer)
    with pytest.raises(InputError, match=r"tool tool \(.*\) cannot be offered"):
        untyped.check(Problem("rows.jsonl:1", {"question": "Go."}))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("no_such_module:X", "no_such_module cannot be imported"),
        ("tests.rollouts.test_loops:X", "tests.rollouts.test_loops has no X"),
        ("nonsense", "package.module:(Name|Class), not 'nonsense'"),
    ],
)
def test_a_plug_in_that_is_not_there_is_named(
    make_config: Callable[..., Config], tokenizer: Any, environment: str, message: str
) -> None:
    with pytest.raises(InputError, match=f"environment.*{message}"):
        Runner(make_config(environment=environment), tokenizer)
    with pytest.raises(InputError, match=rf"rollout\.loop.*{message}"):
        Runner(make_config(rollout={"loop": environment}), tokenizer)


async def test_a_response_budget_shrinks_over_the_rounds(
    attempt: Callable[..., Any], template: ChatTemplate
) -> None:
    """Each turn gets what the turns and results before it have left."""
    said = [call("double", x=4) + END, call("double", x=8) + END, "never said" * 20 + END]
    group = await attempt(said, max_response_tokens=100)
    (trajectory,) = group.trajectories
    (branch,) = trajectory.branches()
    first = len(trajectory.turns[0].added_token_ids)
    assert len(branch.token_ids) - first <= 100
    assert [len(t.completion_token_ids) for t in trajectory.turns[:-1]] == [
        len(template.encode(turn)) for turn in said[: len(trajectory.turns) - 1]
    ]
    assert trajectory.status in ("length", "context_full")
