"""Changes that no test notices: `python -m tests.mutants [--count 400] [--seed 0] [FILES]`.

mutmut changes one operator, number, argument or name of a function at a time and runs the tests
that call this function. A mutant that all of them pass has survived: either a test is missing, or
the change makes no difference. The files are the ones that decide which tokens are trained, and
with which weight (`FILES`). A seeded sample of their mutants is tried, because all of them take
hours. The share that survives is printed with the change that each survivor made.

Left out are mutants that only change the words of a sentence (a string of three words or more):
tests look for a few words of a message, on purpose. Properties and other decorated functions are
not changed by mutmut.

`make mutants` installs mutmut (.venv-mutants) and runs this command.
"""

import argparse
import ast
import difflib
import os
import random
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = [
    "src/turnwise/trajectory/*.py",
    "src/turnwise/training/algorithms/*.py",
    "src/turnwise/training/samples.py",
    "src/turnwise/chat/prompts.py",
]
TESTS = [
    "tests/trajectory",
    "tests/training/algorithms",
    "tests/training/test_samples.py",
    "tests/training/test_token_streams.py",
    "tests/training/test_allowed.py",
    "tests/training/test_teacher_samples.py",
    "tests/training/test_turn_sampling.py",
    "tests/chat/test_prompts.py",
    "tests/chat/test_prompt_cache.py",
    "tests/chat/test_session.py",
    "tests/rollouts/test_context_window.py",
]
SURVIVED, NO_TESTS = "🙁", "🫥"  # mutmut's own signs

CONFIGURATION = """
[tool.mutmut]
source_paths = ["src"]
only_mutate = {files}
also_copy = ["examples", "benchmarks", "docs", "README.md"]
pytest_add_cli_args = ["-p", "no:cacheprovider", "-m", "not slow"]
pytest_add_cli_args_test_selection = {tests}
process_isolation = "forkserver"  # torch's threads do not survive a fork
"""


def prepare(folder: Path, files: list[str], tests: list[str]) -> None:
    """A copy of the project in `folder`, with mutmut's configuration."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("src", "tests", "examples", "benchmarks", "docs", "README.md"):
        ignored = shutil.ignore_patterns("__pycache__")
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder)
    text = (ROOT / "pyproject.toml").read_text()
    text += CONFIGURATION.format(files=files, tests=tests).replace("'", '"')
    (folder / "pyproject.toml").write_text(text)


def changes(folder: Path, files: list[str]) -> dict[str, list[str]]:
    """The lines that each mutant changes (a diff of its function), by mutmut's name of it."""
    from mutmut.mutation.file_mutation import mutate_file_contents
    from mutmut.utils.format_utils import get_mutant_name

    os.chdir(folder)  # mutmut reads its configuration there
    found = {}
    for path in sorted(path for pattern in files for path in Path().glob(pattern)):
        mutated = mutate_file_contents(str(path), path.read_text())
        lines = mutated.code.splitlines()

        def source(name: str, mutated: object = mutated, lines: list[str] = lines) -> str:
            span = mutated.line_span_by_function_name[name]
            return textwrap.dedent("\n".join(lines[span.start - 1 : span.end]))

        for name in mutated.mutant_names:
            before = source(f"{name.partition('__mutmut_')[0]}__mutmut_orig")
            after = source(name)
            if not only_words(before, after):
                diff = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0)
                found[get_mutant_name(path, name)] = [
                    line for line in list(diff)[2:] if line[0] in "+-" and "__mutmut_" not in line
                ]
    return found


def only_words(before: str, after: str) -> bool:
    """Whether two functions differ in nothing but the words of sentences."""

    def without_sentences(code: str) -> str:
        tree = ast.parse(code)
        tree.body[0].name = ""
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words = node.value.removeprefix("XX").removesuffix("XX").split()
                node.value = "" if len(words) >= 3 else node.value
        return ast.dump(tree)

    return without_sentences(before) == without_sentences(after)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("files", nargs="*", default=FILES, help="files or patterns to change")
    made.add_argument("--tests", nargs="*", default=TESTS, help="tests to run")
    made.add_argument("--count", type=int, default=400, help="mutants to try; 0: all of them")
    made.add_argument("--seed", type=int, default=0, help="of the sample")
    made.add_argument("--only", help="regular expression of mutants' names, in place of a sample")
    made.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants")
    asked = made.parse_args()
    if missing := [test for test in asked.tests if not (ROOT / test).exists()]:
        raise SystemExit(f"there is no {missing[0]}")

    prepare(asked.folder, asked.files, asked.tests)
    diffs = changes(asked.folder, asked.files)
    names = sorted(diffs)
    if asked.only:
        names = [name for name in names if re.search(asked.only, name)]
    elif asked.count and asked.count < len(names):
        names = sorted(random.Random(asked.seed).sample(names, asked.count))
    print(f"{len(names)} of {len(diffs)} mutants", flush=True)

    log = asked.folder / "mutmut.log"
    with log.open("w") as output:
        ended = subprocess.run(
            [sys.executable, "-m", "mutmut", "run", *names],
            stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
    lines = log.read_text().rpartition("Mutant results")[2].splitlines()
    results = dict(reversed(line.split(" ", 1)) for line in lines if "__mutmut_" in line)
    if ended.returncode or len(results) != len(names):
        raise SystemExit(f"mutmut stopped (exit status {ended.returncode}): see the end of {log}")

    survivors = [name for name in names if results[name] in (SURVIVED, NO_TESTS)]
    for name in survivors:
        note = "  (no test calls it)" if results[name] == NO_TESTS else ""
        print(f"\n{name}{note}", *diffs[name], sep="\n")
    print(f"\n{len(survivors)} of {len(names)} mutants survived: {len(survivors) / len(names):.1%}")


if __name__ == "__main__":
    main()
