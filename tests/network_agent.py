"""Agents on a machine of their own: an HTTP endpoint that plays trajectories with OpenAI's client.

    python -m tests.network_agent ADDRESS FOLDER

Group g begins once the file `permitted` of the folder has a number above g, so that a test decides
when a step goes on; `begun` gets a line for each trajectory, and `played.jsonl` one with its group
and its seconds.
"""

import asyncio
import json
import re
import sys
import time
from pathlib import Path

from aiohttp import web

from examples.step04_agent.agent import solve

PORT = 8000
_POLL_SECONDS = 0.1


def main(address: str, folder: Path) -> None:
    async def run(request: web.Request) -> web.Response:
        task = await request.json()
        found = re.match(r"group(\d+)", task["id"])
        assert found is not None, task["id"]
        group = int(found[1])
        while int((folder / "permitted").read_text() or 0) <= group:
            await asyncio.sleep(_POLL_SECONDS)
        write("begun", str(group))
        started = time.monotonic()
        await solve(task["base_url"], task["row"])
        seconds = time.monotonic() - started
        write("played.jsonl", json.dumps({"group": group, "seconds": seconds}))
        return web.json_response({})

    def write(name: str, line: str) -> None:
        with (folder / name).open("a") as file:
            file.write(line + "\n")

    application = web.Application()
    application.router.add_post("/run", run)
    web.run_app(application, host=address, port=PORT, print=None)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
