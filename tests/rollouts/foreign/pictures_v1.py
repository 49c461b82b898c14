"""A taskset and a harness of verifiers 0.4 with pictures: one in the task, and one after an answer.

Runs in the environment of verifiers, beside `plain_png.py`.
"""

from collections.abc import Iterable

import aiohttp
import verifiers.v1 as vf
from plain_png import png

__all__ = ["PicturesHarness", "PicturesTaskset"]


class Picture(vf.Task[vf.TaskData]):
    @vf.reward
    async def even(self, trace: vf.Trace) -> float:
        """Return 1.0 for an even number of letters, so that rewards differ."""
        return float(len(trace.last_reply) % 2 == 0)


class PicturesConfig(vf.TasksetConfig):
    count: int = 4


def part(number: int) -> vf.ImageUrlContentPart:
    url = f"data:image/png;base64,{png(40 * number % 256, 80, 200)}"
    return vf.ImageUrlContentPart(image_url=vf.ImageUrlSource(url=url))


class PicturesTaskset(vf.Taskset[Picture, PicturesConfig]):
    def load(self) -> Iterable[Picture]:
        for number in range(self.config.count):
            parts = [vf.TextContentPart(text="Which colour?"), part(number)]
            yield Picture(vf.TaskData(prompt=[vf.UserMessage(content=parts)]), self.config.task)


class PicturesHarness(vf.Harness[vf.HarnessConfig]):
    """Asks twice."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        messages = [message.model_dump(exclude_none=True) for message in data.prompt]
        again = [part(5).model_dump(), {"type": "text", "text": "And this one?"}]
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {secret}"}) as http:
            for _ in range(2):
                body = {"model": ctx.model, "messages": messages}
                async with http.post(f"{endpoint}/chat/completions", json=body) as response:
                    response.raise_for_status()
                    messages.append((await response.json())["choices"][0]["message"])
                messages.append({"role": "user", "content": again})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
