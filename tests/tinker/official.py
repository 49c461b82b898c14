"""Runs the tests of Tinker's cookbook and SDK that can be pointed at a server, and counts.

    make tinker
    pip download --no-deps --no-binary :all: tinker-cookbook==0.6.1
    tar xzf tinker_cookbook-0.6.1.tar.gz
    python -m tests.tinker.official --cookbook tinker_cookbook-0.6.1 [--e2e FOLDER] [-k NAME]

The cookbook's `tests/recipes` start recipes by `uv run python -m MODULE`; what stands in for `uv`
here gives them local rows and the server's model (see `recipes`); nothing else. FOLDER is `e2e` of
the SDK's repository, which its packages lack; its table of servers gets ours. The other tests of
both, in the packages and beside them, mock the server or need none.
"""

import argparse
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from functools import partial
from pathlib import Path
from typing import Any

from tests.tinker.recipes import ENVS, ROOT, SDK, STAND_IN, in_cookbook, model_in, run, server

NAME = "Qwen/Qwen3.5-9B"
"""Name of the small model, which one recipe has in its source."""
KEY = os.environ.get("TINKER_API_KEY", "tml-official")
KEYS = {
    "preference.rlhf.rlhf_pipeline": ("base_model",),
    "distillation.on_policy_distillation": ("model_name", "teacher_model"),
    "distillation.on_policy_multi_teacher": (
        *("model_name", "deepmath_teacher_model", "tulu3_teacher_model"),
    ),
}
"""Arguments of recipes that name models; of others `model_name`."""
LEFT_OUT = {
    "test_recipe_vlm_classifier.py": "needs a model that sees, as `recipes` has one",
    "test_recipe_forecasting.py": "downloads its rows itself",
}
SECONDS = 900.0


def run_recipe(module: str, arguments: list[str]) -> None:
    """Run a recipe with the server's model."""
    keys = KEYS.get(module.removeprefix("tinker_cookbook.recipes."), ("model_name",))
    kept = [each for each in arguments if each.partition("=")[0] not in keys]
    run(module, [*kept, *(f"{key}={NAME}" for key in keys)])


def pytest_collection() -> None:
    """Put our server into the table of the SDK's `e2e`, whose pytest has this file as a plugin."""
    table: Any = sys.modules["conftest"].__dict__["ENVS"]
    url, model = os.environ["TINKER_BASE_URL"], os.environ["RECIPE_NAME"]
    table["prod"] = table["prod"]._replace(base_url=url, models=(model,))


def tested(where: Path, folder: Path, more: list[str], environment: dict[str, str]) -> int:
    """Run pytest, print what each test did, and return how many failed."""
    results = folder / f"{where.name}.xml"
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    command += ["-o", "filterwarnings=", f"--junitxml={results}", *more]
    subprocess.run(command, cwd=where, env=environment, check=False)
    if not results.exists():
        raise SystemExit(f"pytest did not run in {where}")
    failed = passed = skipped = 0
    for case in ET.parse(results).iter("testcase"):
        why = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if why is None else why.tag
        passed, skipped = passed + (why is None), skipped + (outcome == "skipped")
        failed += outcome in ("failure", "error")
        message = "" if why is None else (why.get("message") or "").replace("|", "/")
        lines = [each for each in message.splitlines() if each.strip()]
        shown = (lines or [""])[-1 if "Last 30 lines" in message else 0]
        say(f"| {case.get('name')} | {outcome} | {shown[:240]} |")
    say(f"{where.name}: {passed} passed, {failed} failed, {skipped} skipped")
    return failed


say = partial(print, flush=True)


def main(arguments: list[str]) -> int:
    """Run the command line; return how many tests failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cookbook", type=Path)
    parser.add_argument("--e2e", type=Path)
    parser.add_argument("--url", help="of a server that has the model under the right name")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "official")
    parser.add_argument("-k", default="", help="as in pytest")
    options = parser.parse_args(arguments)
    folder = options.folder.absolute()
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    logs = folder / "cookbook"
    shutil.rmtree(logs, ignore_errors=True)  # else some go on from states of an earlier server
    stand_in = folder / "bin" / "uv"  # uv run python -m MODULE ...
    stand_in.write_text(
        f'#!/bin/sh\nshift 3\ncd {SDK}\nPYTHONPATH="{SDK}:{ROOT}:{ENVS}" '
        f'exec "{sys.executable}" -m tests.tinker.official run "$@"\n'
    )
    stand_in.chmod(0o755)
    model, failed = model_in(folder), 0
    chosen = ["-k", options.k] if options.k else []

    def environment(url: str, name: str) -> dict[str, str]:
        return in_cookbook(
            TINKER_BASE_URL=url,
            TINKER_API_KEY=KEY,
            TINKER_COOKBOOK_RUNS_DIR=str(logs),
            RECIPE_NAME=name,
            RECIPE_TOKENIZER=str(model),
            RECIPE_ROWS="1024",
            SMOKE_TEST_TIMEOUT=str(int(SECONDS)),
            PATH=f"{stand_in.parent}:{os.environ['PATH']}",
        )

    def of_recipes(url: str) -> int:
        own = environment(url, NAME) | {"PYTHONPATH": str(SDK)}  # `tests` is the cookbook's there
        left_out = [f"--ignore=tests/recipes/{name}" for name in LEFT_OUT]
        which = ["tests/recipes", "-s", *left_out, *chosen]
        for name, why in LEFT_OUT.items():
            say(f"left out: {name}, which {why}")
        return tested(options.cookbook.absolute(), folder, which, own)

    def of_sdk(url: str) -> int:
        which = ["-p", "tests.tinker.official", *chosen]
        return tested(options.e2e.absolute(), folder, which, environment(url, str(model)))

    keys = ("model.lora.rank=128", "model.max_length=4096", f"serving.api_key={KEY}")
    for given, name, tests in (
        (options.cookbook, NAME, of_recipes),
        (options.e2e, str(model), of_sdk),
    ):
        if given is not None and options.url:
            failed += tests(options.url)
        elif given is not None:
            with server(model, folder, name, *STAND_IN, *keys) as url:
                failed += tests(url)
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run_recipe(sys.argv[2], sys.argv[3:])
    else:
        raise SystemExit(main(sys.argv[1:]))
