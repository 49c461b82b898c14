"""Several environments in one run: their shares, rows, tools, loops and results."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import turnwise
from tests.rollouts.test_episode import Talking
from turnwise.config import Config, SamplingConfig, dump_config, load_config, parse_config
from turnwise.config.explain import explain_config
from turnwise.errors import InputError
from turnwise.observe.conversations import Overview
from turnwise.observe.metrics import StepMetrics
from turnwise.observe.trackers import MetricsLog
from turnwise.rollouts import Batch, Group, Problem, ProblemStream, Runner, TrajectorySampler
from turnwise.rollouts.agent_loop import RolloutContext
from turnwise.rollouts.data import load_heldout, load_training
from turnwise.rollouts.evaluation import evaluate
from turnwise.rollouts.problems import (
    JoinedProblems,
    MixedStream,
    Problems,
    first_of_each,
    make_stream,
)
from turnwise.run.commands import ProgramInputs, all_problems, load_problems
from turnwise.trajectory import Outcome, Trajectory

HERE = "tests.rollouts.test_mixture"


class Shop(turnwise.Environment):
    def __init__(self, row: dict[str, Any]) -> None:
        self.problem = f"Buy {row['wish']}."
        self.tools = [self.price]

    def price(self, item: str) -> float:
        """Look up a price.

        Args:
            item: The item.
        """
        return 2.5

    def reward(self, trajectory: Trajectory) -> float:
        return 1.0


class Sums(turnwise.Environment):
    def __init__(self, row: dict[str, Any]) -> None:
        self.problem = f"How much is {row['sum']}?"

    def reward(self, trajectory: Trajectory) -> float:
        return 0.25


class Once:
    """A loop that says what it saw."""

    async def run(self, environment: Any, context: RolloutContext) -> None:
        trajectory = context.trajectory
        trajectory.messages = list(context.problem)
        completion = await context.sample(await context.first_prompt(trajectory.messages))
        assert completion is not None
        trajectory.events["once"] += 1
        trajectory.messages.append({"role": "assistant", "content": "seen"})
        trajectory.status = "completed"


def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number


def tree(folder: Path, **more: Any) -> dict[str, Any]:
    """A configuration of two environments whose rows have the same file name."""
    entries: dict[str, Any] = {}
    for name, kind, rows in (
        ("shop", "Shop", [{"wish": f"tea {n}"} for n in range(6)]),
        ("sums", "Sums", [{"sum": f"1 + {n}"} for n in range(4)]),
    ):
        (folder / name).mkdir(exist_ok=True)
        path = folder / name / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"path": str(path), "eval_path": str(path), "eval_limit": 2}
        entries[name] = {"environment": f"{HERE}:{kind}", "data": data}
    entries["sums"] |= {"weight": 3, "loop": f"{HERE}:Once", "tools": [{"use": f"{HERE}:double"}]}
    return {"model": {"path": "m"}, "environments": entries, **more}


def streams(counts: dict[str, int], seed: int = 0) -> dict[str, ProblemStream]:
    return {
        name: ProblemStream(Problems("rows", [{"n": n} for n in range(count)], name), seed)
        for name, count in counts.items()
    }


async def take(stream: Any, count: int) -> list[Problem]:
    return [await stream.take_one(60.0) for _ in range(count)]


@given(
    weights=st.dictionaries(
        st.text("abcde", min_size=1, max_size=2), st.floats(0.05, 20), min_size=1, max_size=4
    ),
    count=st.integers(0, 120),
)
def test_each_environment_has_its_share_of_any_number_of_groups(
    weights: dict[str, float], count: int
) -> None:
    stream = MixedStream(streams(dict.fromkeys(weights, 5)), weights)
    taken = Counter(problem.environment for problem in asyncio.run(take(stream, count)))
    for name, weight in weights.items():
        share = count * weight / sum(weights.values())
        assert abs(taken[name] - share) <= len(weights)


async def test_within_an_environment_the_order_is_that_of_the_seed() -> None:
    mixed = MixedStream(streams({"a": 5, "b": 3}, 7), {"a": 2.0, "b": 1.0})
    alone = streams({"a": 5, "b": 3}, 7)
    taken = await take(mixed, 30)
    for name, count in (("a", 20), ("b", 10)):
        assert [p for p in taken if p.environment == name] == alone[name].take(count)
    assert [p.environment for p in taken[:6]] == ["a", "b", "a"] * 2
    at_once = MixedStream(streams({"a": 5, "b": 3}, 7), {"a": 2.0, "b": 1.0})
    assert at_once.take(30) == taken


@given(before=st.integers(0, 30), after=st.integers(0, 30))
def test_a_restored_mixture_goes_on_where_the_first_stopped(before: int, after: int) -> None:
    weights = {"a": 3.0, "b": 1.0, "c": 0.7}
    first = MixedStream(streams(dict.fromkeys(weights, 4)), weights)
    asyncio.run(take(first, before))
    state = json.loads(json.dumps(first.state()))
    second = MixedStream(streams(dict.fromkeys(weights, 4)), weights)
    second.restore(state)
    assert second.state() == state
    assert asyncio.run(take(second, after)) == asyncio.run(take(first, after))


async def test_another_weight_counts_from_the_resume_on() -> None:
    first = MixedStream(streams({"a": 4, "b": 4}), {"a": 1.0, "b": 1.0})
    await take(first, 100)
    second = MixedStream(streams({"a": 4, "b": 4}), {"a": 3.0, "b": 1.0})
    second.restore(first.state())
    taken = Counter(problem.environment for problem in await take(second, 40))
    assert taken == {"a": 30, "b": 10}


def test_a_state_of_other_environments_is_refused() -> None:
    two = MixedStream(streams({"a": 4, "b": 4}), {"a": 1.0, "b": 1.0})
    one = streams({"a": 4})["a"]
    other = MixedStream(streams({"a": 4, "c": 4}), {"a": 1.0, "c": 1.0})
    fewer = MixedStream(streams({"a": 4, "b": 3}), {"a": 1.0, "b": 1.0})
    with pytest.raises(InputError, match="stopped with the environments a, b and now has a, c"):
        other.restore(two.state())
    with pytest.raises(InputError, match="stopped with a single environment and now has a, b"):
        two.restore(one.state())
    with pytest.raises(InputError, match="stopped with the environments a, b: give"):
        one.restore(two.state())
    with pytest.raises(InputError, match=r"environments\.b: .* 4 problems and now has 3"):
        fewer.restore(two.state())


def test_joined_problems_are_those_of_each_in_turn() -> None:
    parts = {name: Problems("d/rows", [{"n": n} for n in range(3)], name) for name in "ab"}
    joined = JoinedProblems(parts)
    each = [problem for part in parts.values() for problem in part]
    assert list(joined) == each == joined[:]
    assert [problem.id for problem in each[2:4]] == ["a/rows:3", "b/rows:1"]
    assert (len(joined), joined[-1]) == (6, each[5])
    assert first_of_each(joined) == [each[0], each[3]]
    assert first_of_each(each) == each[:1]
    with pytest.raises(IndexError):
        joined[6]


def test_rows_of_the_same_file_name_have_names_of_their_own(tmp_path: Path) -> None:
    config = parse_config(tree(tmp_path))
    problems = load_training(config)
    assert len({problem.id for problem in problems}) == len(problems) == 10
    assert (problems[6].id, problems[6].environment) == ("sums/rows.jsonl:1", "sums")
    assert len(load_heldout(config)) == 4
    training, heldout = all_problems(config, ProgramInputs())
    assert (len(training), len(heldout)) == (10, 4)


def test_only_environments_with_held_out_rows_are_evaluated(tmp_path: Path) -> None:
    made = tree(tmp_path)
    del made["environments"]["shop"]["data"]["eval_path"]
    _, heldout = all_problems(parse_config(made), ProgramInputs())
    assert {problem.environment for problem in heldout} == {"sums"}
    del made["environments"]["sums"]["data"]["eval_path"]
    assert all_problems(parse_config(made), ProgramInputs())[1] == []


def test_held_out_sets_have_names(tmp_path: Path) -> None:
    made = tree(tmp_path)
    path = made["environments"]["sums"]["data"].pop("eval_path")
    made["environments"]["sums"]["data"]["eval_sets"] = {"easy": path, "hard": path}
    _, heldout = all_problems(parse_config(made), ProgramInputs())
    assert isinstance(heldout, JoinedProblems)
    assert [*heldout.parts] == ["shop", "sums/easy", "sums/hard"]
    assert [heldout.name_of_part(index) for index in range(6)] == [
        *["shop"] * 2, *["sums/easy"] * 2, *["sums/hard"] * 2,
    ]  # fmt: skip
    assert (heldout[2].id, heldout[2].environment) == ("sums/easy/rows.jsonl:1", "sums")
    sets = {"path": path, "eval_sets": {"easy": path}}
    one = {"environment": "a:B", "model": {"path": "m"}, "data": sets}
    assert load_heldout(parse_config(one))[0].id == "easy/rows.jsonl:1"
    _, given = all_problems(
        parse_config(one), ProgramInputs(eval_rows={"a": [{"n": 1}], "b": [{"n": 2}]})
    )
    assert [problem.id for problem in given] == ["a/eval_data:1", "b/eval_data:1"]
    sets["eval_path"] = path
    with pytest.raises(InputError, match="eval_path and eval_sets are both set"):
        parse_config(one)
    sets |= {"eval_path": None, "eval_sets": {"a b": path}}
    with pytest.raises(InputError, match="the name 'a b' must have letters, digits, _ and - only"):
        parse_config(one)


def test_what_is_wrong_with_one_environment_names_it(tmp_path: Path) -> None:
    made = tree(tmp_path)
    made["environments"]["sums"]["data"] = {"eval_path": "x"}
    with pytest.raises(InputError, match=r"environments\.sums: data\.path must be set"):
        load_training(parse_config(made))
    made["environments"]["sums"]["data"] = {"path": str(tmp_path / "none.jsonl")}
    with pytest.raises(InputError, match=r"environments\.sums: .*none\.jsonl"):
        load_training(parse_config(made))


def test_a_programs_own_rows_are_not_mixed(tmp_path: Path) -> None:
    config = parse_config(tree(tmp_path))
    with pytest.raises(InputError, match="environments has its own environments and rows"):
        load_problems(config, ProgramInputs(rows=[{"n": 1}]))


async def test_a_runs_stream_has_weights_and_curricula_by_environment(
    tmp_path: Path,
) -> None:
    config = parse_config(tree(tmp_path, data={"curriculum": True}))
    stream = make_stream(
        load_training(config), config.data, config.seed, config.environment_weights
    )
    taken = await take(stream, 8)
    assert Counter(problem.environment for problem in taken) == {"shop": 2, "sums": 6}
    stream.learn(taken[0].id, "mastered")
    pools = stream.pools()
    assert list(pools) == ["shop", "sums"]
    assert sum(each["mastered"] for each in pools.values()) == 1
    assert pools[taken[0].environment]["mastered"] == 1
    assert stream.find(taken[3].id) == taken[3]
    for problem in {problem.id: problem for problem in taken if problem.environment == "sums"}:
        if problem != "sums/rows.jsonl:1":
            stream.leave_out(stream.find(problem), "too long")
    assert {p.id for p in await take(stream, 30) if p.environment == "sums"} == {
        "sums/rows.jsonl:1"
    }


@pytest.fixture(params=[False, True], ids=["threads", "processes"])
def several(
    make_config: Callable[..., Config],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Config:
    single = make_config()
    rollout = {"loop": "tool_calling", "environment_process": request.param}
    made = tree(tmp_path, rollout=rollout, output_dir=str(tmp_path / "runs"))
    made |= {"model": single.model.model_dump(), "sampling": {"n": 2, "max_tokens": 8}}
    return parse_config(made)


async def test_each_environment_is_played_with_its_tools_and_its_loop(
    several: Config, tokenizer: Any
) -> None:
    runner, engine = Runner(several, tokenizer), Talking(vocab_size=256)
    problems = load_training(several)
    for problem in first_of_each(problems):
        assert await asyncio.to_thread(runner.check, problem)
    groups = [
        await runner.run_group(engine, problem, several.sampling, "t")
        for problem in first_of_each(problems)
    ]
    assert [group.environment for group in groups] == ["shop", "sums"]
    assert [t.environment for group in groups for t in group.trajectories] == [
        *("shop", "shop"),
        *("sums", "sums"),
    ]
    assert {t.reward for t in groups[0].trajectories} == {1.0}
    assert {t.reward for t in groups[1].trajectories} == {0.25}
    assert [t.events["once"] for group in groups for t in group.trajectories] == [0, 0, 1, 1]
    offered = []
    for problem in first_of_each(problems):
        episode = runner._stages[problem.environment].episode(problem)
        assert await episode.preview(set_up=True)
        offered.append([schema["function"]["name"] for schema in episode.toolbox.schemas])
    assert offered == [["price"], ["double"]]
    group = Group.from_dict(json.loads(json.dumps(groups[1].to_dict())))
    assert (group.environment, group.trajectories[0].environment) == ("sums", "sums")


async def test_results_are_those_of_all_and_of_each(several: Config, tokenizer: Any) -> None:
    runner, engine = Runner(several, tokenizer), Talking(vocab_size=256)

    async def run_group(problem: Problem, tag: str) -> Group:
        return await runner.run_group(engine, problem, SamplingConfig(n=1, max_tokens=8), tag)

    evaluation = await evaluate(run_group, load_heldout(several), several.eval, several.rollout, 4)
    assert evaluation.accuracy == 0.5
    assert {name: found["accuracy"] for name, found in evaluation.environments.items()} == {
        "shop": 1.0,
        "sums": 0.0,
    }
    assert evaluation.environments["sums"]["reward_mean"] == 0.25


def groups_of(rewards: dict[str, list[float]]) -> list[Group]:
    return [
        Group(
            f"{name}/rows:1",
            [
                Trajectory(f"{name}/rows:1", i, environment=name, outcome=Outcome(r))
                for i, r in enumerate(of)
            ],
            environment=name,
        )
        for name, of in rewards.items()
    ]


def test_metrics_have_each_environment_by_its_name(tmp_path: Path) -> None:
    groups = groups_of({"shop": [1.0, 0.0], "sums": [0.25, 0.25, 0.25]})
    groups[1].dropped["tool_error"] = 1
    pools = {
        "shop": {"fresh": 3, "mixed": 1, "mastered": 0, "hopeless": 0, "resting": 0},
        "sums": {"fresh": 2, "mixed": 0, "mastered": 0, "hopeless": 1, "resting": 1},
    }
    metrics = StepMetrics(step=1)
    metrics.add_rollouts(Batch(groups, seconds=1.0, pools=pools), Counter())
    row = metrics.to_json()
    assert row["reward_mean"] == pytest.approx(1.75 / 5)
    assert row["environments"]["sums"] == {
        "reward_mean": 0.25,
        "trajectories": 3,
        "dropped": 1,
        "groups": 1,
        "pools": pools["sums"],
    }
    assert row["pools"] == {"fresh": 5, "mixed": 1, "mastered": 0, "hopeless": 1, "resting": 1}
    written: dict[str, float] = {}

    class Spy:
        def write(self, step: int, values: dict[str, float]) -> None:
            written.update(values)

        def close(self) -> None: ...

    trackers = MetricsLog(tmp_path, parse_config(tree(tmp_path)))
    trackers._trackers["spy"] = Spy()  # type: ignore[assignment]
    trackers.write(row)
    trackers.close()
    assert written["environments/shop/reward_mean"] == 0.5
    assert written["environments/sums/pools/resting"] == written["pools/resting"] == 1.0


def test_one_environment_has_no_metrics_by_name() -> None:
    metrics = StepMetrics(step=1)
    metrics.add_rollouts(
        Batch([Group("rows:1", [Trajectory("rows:1", outcome=Outcome(1.0))])]), Counter()
    )
    assert not {"environments", "pools"} & metrics.to_json().keys()


def test_an_overview_names_the_environments() -> None:
    overview = Overview.of(
        t for g in groups_of({"sums": [0.25], "shop": [1.0, 0.0]}) for t in g.trajectories
    )
    line = "environments: shop 0.500 (2 trajectories), sums 0.250 (1 trajectory)"
    assert line in overview.lines()


def test_what_cannot_be_loaded_names_the_environment(several: Config, tokenizer: Any) -> None:
    sums = several.environments["sums"].model_copy(update={"environment": f"{HERE}:Nothing"})
    broken = several.model_copy(update={"environments": {**several.environments, "sums": sums}})
    with pytest.raises(
        InputError, match=rf"environments\.sums: environment: {HERE} has no Nothing"
    ):
        Runner(broken, tokenizer)


async def test_texts_of_a_program_need_no_environment(several: Config, tokenizer: Any) -> None:
    sampler = TrajectorySampler(
        Talking(vocab_size=256), ["Hello"], {"n": 1}, config=several, tokenizer=tokenizer
    )
    assert len([trajectory async for trajectory in sampler]) == 1


async def test_a_batch_of_a_program_has_one_environment(several: Config, tokenizer: Any) -> None:
    sampler = TrajectorySampler(
        Talking(vocab_size=256), [{"wish": "tea"}], config=several, tokenizer=tokenizer
    )
    with pytest.raises(InputError, match=r"prompt:1 names none of the environments \(shop, su"):
        _ = [trajectory async for trajectory in sampler]


def test_a_configuration_of_several_reads_back(tmp_path: Path) -> None:
    config = parse_config(tree(tmp_path, data={"curriculum": True}))
    for text in (dump_config(config), explain_config(config)):
        path = tmp_path / "again.yaml"
        path.write_text(text)
        assert load_config(path) == config
    path.write_text(yaml.safe_dump(tree(tmp_path)))
    assert load_config(path, ["environments.shop.weight=2.5"]).environments["shop"].weight == 2.5
