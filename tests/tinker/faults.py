"""Clients that send nonsense, vanish, or lose their server: what each saw, and its memory.

    make tinker
    python -m tests.tinker.faults [--clients 1000] [--wait 1000]

Starts `turnwise tinker` with the calculator's model. Clients of the SDK send what is wrong, and the
table shows what they saw. Then many sessions are opened, a tenth of them with an adapter, each asks
for samples that it never fetches, and all fall silent; memory is that of all of the server's
processes, before, then, and once their sessions must have ended (15 minutes later). At last a
server is killed (kill -9) under eight clients with requests in progress, and another one goes on.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.tinker.recipes import NAME, ROOT, SDK, TOY, in_cookbook, server
from tests.tinker.test_tinker_state_sdk import seen_by_clients

say = partial(print, flush=True)


def memory(pid: int) -> float:
    """Return the memory of a process and its descendants in MiB, shared pages counted once."""
    own = psutil.Process(pid)
    processes = [own, *own.children(recursive=True)]
    return sum(each.memory_full_info().pss for each in processes) / 2**20


def mistakes(url: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what clients do wrong."""
    sys.path.insert(0, str(SDK))
    import tinker
    from tinker import types

    first = tinker.ServiceClient(base_url=url, api_key="tml-first")
    other = tinker.ServiceClient(base_url=url, api_key="tml-other")
    training = first.create_lora_training_client(NAME, rank=4).result()
    path = training.save_weights_for_sampler("mine").result().path

    def passed(ids: list[int], weight: float, loss: Any = "cross_entropy") -> Any:
        inputs: Any = {"target_tokens": ids, "weights": [weight] * len(ids)}
        datum = types.Datum(model_input=types.ModelInput.from_ints(ids), loss_fn_inputs=inputs)
        return training.forward_backward([datum], loss).result()

    yield "a weight that is NaN", lambda: passed([5, 6, 7], float("nan"))
    yield "an id that the model has not", lambda: passed([5, 6, 10**6], 1.0)
    yield "a datum that is too long", lambda: passed([5] * 5000, 1.0)
    yield "a loss that the server has not", lambda: passed([5, 6], 1.0, "stable_reinforce")
    yield "another's path", lambda: other.create_sampling_client(model_path=path).result()
    yield "a path that is none", lambda: first.create_sampling_client("/etc/passwd").result()
    yield "another model", lambda: first.create_lora_training_client("Qwen/Qwen3-8B").result()
    yield (
        "a rank that is too large",
        lambda: first.create_lora_training_client(NAME, rank=512).result(),
    )
    yield "then one without a mistake", lambda: passed([5, 6, 7], 1.0)


def vanish(url: str, clients: int) -> int:
    """Open sessions that ask and never come back; return how many requests were refused."""
    refused = 0
    with httpx.Client(base_url=f"{url}/api/v1", timeout=60) as http:
        for number in range(clients):
            key = {"X-API-Key": f"tml-{number}"}
            post = partial(http.post, headers=key)
            session = post("create_session", json={}).json()["session_id"]
            own = {"session_id": session}
            body = own | {"sampling_session_seq_id": 0, "base_model": NAME}
            sampler = post("create_sampling_session", json=body).json()["sampling_session_id"]
            prompt = {"chunks": [{"tokens": [5, 6, 7]}]}
            body = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 4}
            body |= {"prompt": prompt, "sampling_params": {"max_tokens": 64}}
            answers = [post("asample", json=body)]
            if number % 10 == 0:
                body = own | {"model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": 8}}
                answers.append(post("create_model", json=body))
            refused += sum(not each.is_success for each in answers)
            if number % 100 == 99:
                sys.stderr.write(f"{number + 1} clients\n")
    return refused


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--wait", type=float, default=1000.0)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "faults")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with server(TOY, options.folder) as url:
        (pid,) = (each.pid for each in psutil.Process().children() if "tinker" in each.cmdline())
        say("| what a client did | what it saw |\n|---|---|")
        for name, attempt in mistakes(url):
            try:
                attempt()
                seen = "a result"
            except Exception as error:
                seen = f"{type(error).__name__}: {error}"
            say(f"| {name} | {seen[:200]} |")
        say(f"before: {memory(pid):,.0f} MiB")
        began = time.monotonic()
        refused = vanish(url, options.clients)
        took = time.monotonic() - began
        say(f"{options.clients} clients in {took:.0f} s, {refused} requests refused")
        say(f"then: {memory(pid):,.0f} MiB")
        ends = time.monotonic() + options.wait
        while (left := ends - time.monotonic()) > 0:
            sys.stderr.write(f"{left:.0f} s to wait, {memory(pid):,.0f} MiB\n")
            time.sleep(min(60.0, left))
        say(f"{options.wait:.0f} s later: {memory(pid):,.0f} MiB")
    killed(options.folder)


def killed(folder: Path) -> None:
    """Print what eight clients saw of a server that was killed."""
    place = Path(tempfile.mkdtemp(dir=folder))
    say("| client | sample in progress | pass in progress | its model | samplers | resumed |")
    say("|---|---|---|---|---|---|")
    for number, each in enumerate(seen_by_clients(str(TOY), place, in_cookbook())):
        cells = [
            f"{each['sampled']} samples",
            each["passed"][:100],
            each["lost"][:100],
            "as before" if each["after"] == each["before"] else "differ",
            "bit for bit" if each["resumed"] == each["expected"] else "differs",
        ]
        say(f"| {number} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
