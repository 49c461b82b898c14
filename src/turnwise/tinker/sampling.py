"""Samples of prompts, and log-probs of given tokens, from the engines."""

from collections.abc import Sequence

import numpy as np

from turnwise.core.aio import together
from turnwise.core.optional import Foreign
from turnwise.engine.protocol import Completion, Generator, Request, Route, generate
from turnwise.errors import EngineError
from turnwise.tinker import requests


async def answer(
    generator: Generator,
    asked: requests.Sample,
    ids: Sequence[int],
    name: str,
    route: Route,
    longest: int,
    vocabulary: int,
) -> tuple[list[Completion], Foreign]:
    """Return the samples of a prompt that are asked for, and `target_prompt_logprobs`, or None."""
    made = [
        Request(
            list(ids),
            asked.sampling(len(ids), longest, number),
            f"{name}:{number}",
            asked.seed(number),
            route,
        )
        for number in range(asked.num_samples)
    ]
    scores = None
    if (targets := asked.target_prompt_logprobs) is not None:
        scores = await _score(generator, targets, made[0], vocabulary)
    return await together(_completed(generator, each) for each in made), scores


async def _score(
    generator: Generator, targets: requests.TargetIds, request: Request, vocabulary: int
) -> Foreign:
    """Return the log-probs of given ids at positions of a request's prompt."""
    values = np.zeros(len(targets.data), np.float32)

    async def score(row: int, places: list[int]) -> None:
        one = request._replace(
            prompt=request.prompt[: row + 1],
            sampling=targets.sampling(places),
            id=f"{request.id}:row{row}",
        )
        ((_, *scores),) = (await _completed(generator, one)).alternatives
        values[places] = [logprob for _, logprob, _ in scores]

    rows = targets.places(len(request.prompt), vocabulary)
    await together(score(*each) for each in rows.items())
    return targets.tensor(values)


async def _completed(generator: Generator, request: Request) -> Completion:
    done = await generate(generator, request)
    if done.finish_reason == "abort":
        raise EngineError(f"an engine ended {request.id} early")
    return done
