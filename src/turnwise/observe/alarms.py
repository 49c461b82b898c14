"""Alarms: one sentence, once in a run, for each metric that passes its threshold in `alarms`."""

import json
import shlex
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from turnwise.config import Config, load_config
from turnwise.config.base import NEEDED_KEYS
from turnwise.core.json_types import JsonObject
from turnwise.core.untrusted_files import open_untrusted

_MEAN = "<mean>"  # placeholder for the mean in a sentence
_RUN = "<run>"  # placeholder for the run's folder in a command
_NEGLIGIBLE_DIFF = 1e-3  # log-prob difference below which growth does not matter


@dataclass(frozen=True, slots=True)
class Alarm:
    """A threshold that was passed."""

    name: str  # key of the threshold in the section `alarms`
    step: int
    message: str  # one sentence: the figures, and what helps


class Share(NamedTuple):
    """A share of a step that an alarm watches."""

    limit: float | None  # the threshold; None disables the alarm
    value: float
    sentence: str  # of the alarm; `_MEAN` is replaced by the mean over the last steps


def find_alarms(rows: Iterable[JsonObject], config: Config, run: Path | None = None) -> list[Alarm]:
    """Return all alarms of a run, in the order of their steps, from its lines of metrics.jsonl."""
    find = alarm_finder(config, run)
    return [alarm for row in rows for alarm in find(row)]


def alarms_of_run(run: Path) -> list[Alarm]:
    """Return the alarms of a run folder; an empty list for a run without steps."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    config = load_config(run / "config.yaml", optional=NEEDED_KEYS)
    with open_untrusted(path) as file:
        return find_alarms(map(json.loads, file), config, run)


def alarm_finder(config: Config, run: Path | None = None) -> Callable[[JsonObject], list[Alarm]]:
    """Return a function that returns the alarms that the next line of metrics.jsonl raises.

    Args:
        run: Folder of the run, for the commands in sentences; None takes the folder that the
            configuration names.
    """
    folder = shlex.quote(str(run or config.run_folder))
    rows, raised, steps = list[JsonObject](), set[str](), config.alarms.steps

    def messages() -> Iterator[tuple[str, str]]:
        last = [dict(_shares(row, config)) for row in rows[-steps:]]
        for name, share in last[-1].items():
            values = [shares[name].value for shares in last if name in shares]
            if share.limit and len(values) == steps and min(values) > share.limit:
                said = share.sentence.replace(_MEAN, f"{statistics.fmean(values):.0%}")
                yield name, f"{said} (a mean over {steps} steps)"
        for name, check in _TRENDS.items():
            if getattr(config.alarms, name) and (message := check(rows, config)):
                yield name, message

    def find(row: JsonObject) -> list[Alarm]:
        # Alarms are about rollouts, not about step 0 or supervised training.
        if not row["step"] or "reward_mean" not in row:
            return []
        rows.append(row)
        found = {name: said for name, said in messages() if name not in raised}
        raised.update(found)
        return [
            Alarm(name.partition(" ")[0], row["step"], said.replace(_RUN, folder))
            for name, said in found.items()
        ]

    return find


def _shares(row: JsonObject, config: Config) -> Iterator[tuple[str, Share]]:
    """Yield the shares of a step, each with its key in the section `alarms`. If a share is of
    only one environment, the environment's name follows the key."""
    alarms, training = config.alarms, config.training
    said = f"{_MEAN} of the groups have no signal: all their rewards are equal"
    if not config.algorithm.dynamic_sampling:
        said += (
            "; raise sampling.n, choose problems that the model solves sometimes, set "
            "data.curriculum to let their rows rest, or algorithm.dynamic_sampling to replace them"
        )
    silent = row.get("groups_without_signal", 0) / config.rollout.prompts_per_step
    yield "no_signal", Share(alarms.no_signal, silent, said)
    said = (
        f"{_MEAN} of the trajectories end at their maximum length: raise sampling.max_tokens or "
        "model.max_length, or discourage long answers (algorithm.overlong_tokens)"
    )
    ended = row.get("statuses", {})
    cut_off = ended.get("length", 0) + ended.get("context_full", 0)
    yield "truncated", Share(alarms.truncated, _share(cut_off, row["trajectories"]), said)
    events = row.get("events", {})
    failed = {k: n for k, n in events.items() if k.startswith("tool_") and k != "tool_call"}
    called = events.get("tool_call", 0) + events.get("tool_malformed", 0)
    said = (
        f"{_MEAN} of the tool calls fail (in the last step {_listed(failed)}): read what was "
        f"called with `turnwise show {_RUN}`, and the tools' tracebacks in errors.log"
    )
    yield "tool_errors", Share(alarms.tool_errors, _share(sum(failed.values()), called), said)
    counts = {k: n for k, n in row.get("dropped", {}).items() if k != "no_reward"}  # not a failure
    lost = sum(counts.values())
    reasons = f" (in the last step {_listed(counts)})" if counts else ""
    said = (
        f"{_MEAN} of the trajectories fail and are dropped{reasons}: errors.log in the run folder "
        "has their errors"
    )
    others = row.get("trajectories_discarded", 0)
    yield "dropped", Share(alarms.dropped, _share(lost, lost + row["trajectories"] + others), said)
    for name, own in (row.get("environments") or {}).items():
        lost = own.get("dropped", 0)
        whole = lost + own.get("trajectories", 0) + own.get("trajectories_discarded", 0)
        said = (
            f"{_MEAN} of the trajectories of the environment {name} fail and are dropped: "
            "errors.log in the run folder has their errors"
        )
        yield f"dropped {name}", Share(alarms.dropped, _share(lost, whole), said)
    advice = (
        "more engines (turnwise scale, serving.workers), "
        "or a larger rollout.concurrency if one is set,"
        if training.max_staleness
        else "rollouts that run ahead (training.max_staleness: 1) or more engines (serving.workers)"
    )
    said = f"the trainer waits for rollouts during {_MEAN} of a step; {advice} may help"
    waiting = row.get("phase_seconds", {}).get("idle", 0)
    yield "idle", Share(alarms.idle, _share(waiting, row.get("step_seconds", 0)), said)
    if bound := training.max_staleness:
        by_age: dict[str, int] = row.get("staleness", {})
        versions = bound * config.versions_per_step
        old = sum(count for age, count in by_age.items() if int(age) >= versions)
        said = (
            f"{_MEAN} of the trained tokens are as old as training.max_staleness allows ({bound} "
            f"step{'s' if bound > 1 else ''}): rollouts are slower than the trainer; use more "
            "engines, or correct for it (algorithm.correction)"
        )
        yield "stale", Share(alarms.stale, _share(old, sum(by_age.values())), said)


def logprob_growth(rows: Sequence[JsonObject], config: Config) -> str:
    first, last = _first_and_last(rows, config, "logprob_diff_mean")
    if min(last) <= max(first * (config.alarms.logprob_growth or 1), _NEGLIGIBLE_DIFF):
        return ""
    return (
        f"the log-probs of engine and trainer differ by {last[-1]:.2g} on average, {first:.2g} at "
        "the start: lower training.learning_rate, set model.dtype to float32, or weight the "
        "difference away (algorithm.correction)"
    )


def entropy_left(rows: Sequence[JsonObject], config: Config) -> str:
    first, last = _first_and_last(rows, config, "entropy")
    if max(last) >= first * (config.alarms.entropy_left or 0):
        return ""
    return (
        f"the policy's entropy fell from {first:.3g} to {last[-1]:.3g} nats: the samples of a "
        "group become equal, and nothing more is learned; lower training.learning_rate, set "
        "algorithm.kl.coef, or raise algorithm.loss.clip_high"
    )


def reward_left(rows: Sequence[JsonObject], config: Config) -> str:
    steps = config.alarms.steps
    rewards = [row["reward_mean"] for row in rows]
    if len(rewards) < 2 * steps:
        return ""
    windows = [rewards[end - steps : end] for end in range(steps, len(rewards) - steps + 1)]
    best, last = max(windows, key=statistics.fmean), rewards[-steps:]
    high, low = statistics.fmean(best), statistics.fmean(last)
    error = (sum(map(statistics.pvariance, (best, last))) / steps) ** 0.5
    if max(last) >= high * (config.alarms.reward_left or 0) or high - low <= 2 * error:
        return ""
    return (
        f"the mean reward fell from {high:.3f} to {low:.3f}: lower training.learning_rate, set "
        "algorithm.kl.coef, and go back to a checkpoint from before"
    )


def flat_steps(rows: Sequence[JsonObject], config: Config) -> str:
    count = config.alarms.flat_steps
    if len(rows) < max(count, 2):
        return ""
    rewards = [row["reward_mean"] for row in rows[-count:]]
    halves = rewards[: count // 2], rewards[count // 2 :]
    before, after = map(statistics.fmean, halves)
    error = sum(statistics.pvariance(half) / len(half) for half in halves) ** 0.5
    if after - before > 2 * error:  # two standard errors of the difference
        return ""
    return (
        f"the mean reward has not risen for {count} steps ({before:.3f}, then {after:.3f}): if it "
        "is not as high as it can be, try another training.learning_rate, or read trajectories "
        f"with `turnwise show {_RUN}`"
    )


def slow_worker(rows: Sequence[JsonObject], config: Config) -> str:
    last, limit = rows[-config.alarms.steps :], config.alarms.slow_worker or 0.0
    if len(last) < config.alarms.steps:
        return ""
    shares = [  # each worker's speed, as a share of the others' median
        {
            name: _share(speed, statistics.median(others))
            for name, speed in speeds.items()
            if (others := [speeds[one] for one in speeds if one != name])
        }
        for speeds in (row.get("worker_tokens_per_s") or {} for row in last)
    ]
    for name, share in shares[-1].items():
        if all(earlier.get(name, 1.0) < limit for earlier in shares):
            speed = last[-1]["worker_tokens_per_s"][name]
            return (
                f"{name} samples {speed:,.3g} tokens/s in a turn, {share:.0%} of what the other "
                "workers do: look for other programs on its machine or GPU, and at its turns "
                f"with `turnwise trace timeline {_RUN} FILE`"
            )
    return ""


def _first_and_last(
    rows: Sequence[JsonObject], config: Config, name: str
) -> tuple[float, list[float]]:
    """Return the mean of a metric over the first `alarms.steps` steps that have it, and the
    metric's values at the last `alarms.steps` of these steps. Return zeros while the first and the
    last steps overlap."""
    values = [row[name] for row in rows if row.get(name) is not None]
    steps = config.alarms.steps
    if len(values) < 2 * steps:
        return 0.0, [0.0]
    return statistics.fmean(values[:steps]), values[-steps:]


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


_TRENDS: dict[str, Callable[[Sequence[JsonObject], Config], str]] = {
    check.__name__: check
    for check in (logprob_growth, entropy_left, reward_left, flat_steps, slow_worker)
}
"""Checks of the trends of a run, by their keys in the section `alarms`: each check gets the lines
of all steps so far, and returns the sentence of its alarm, or "" if there is no alarm."""
