"""Files that rollouts append to: whole lines, written by the driver only."""

import json
import threading
from pathlib import Path

from turnwise.core.run_files import RunFiles


def test_lines_of_many_threads_stay_whole(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "run")

    def write(number: int) -> None:
        for _ in range(50):
            files.append("extra.jsonl", json.dumps([number] * 5_000) + "\n")

    threads = [threading.Thread(target=write, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = [json.loads(line) for line in (tmp_path / "run" / "extra.jsonl").open()]
    assert len(lines) == 400
    assert all(set(line) == {line[0]} for line in lines)


async def test_elsewhere_texts_are_kept_for_the_driver(tmp_path: Path) -> None:
    files = RunFiles(None)
    files.append("extra.jsonl", "{}\n")
    await files.log_error("reward_error", "rows:1", ValueError("\x1b[2Jall is well"))
    (extra, (name, entry)) = files.take()
    assert extra == ("extra.jsonl", "{}\n")
    assert name == "errors.log"
    assert r"ValueError: \x1b[2Jall is well" in entry
    assert files.take() == []
    driver = RunFiles(tmp_path)
    driver.append(name, entry)
    assert (tmp_path / "errors.log").read_text() == entry
