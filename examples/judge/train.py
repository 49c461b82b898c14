"""Serve the judge that follows a rule, and train with its scores alone.

python -m examples.judge.train
"""

import threading
from pathlib import Path

import turnwise
from turnwise.config import load_config

from .rule import Rule

CONFIG = Path(__file__).parent / "config.yaml"


def main(**keys: object) -> None:
    rewards = [part.model_dump() for part in load_config(str(CONFIG)).rollout.rewards]
    with Rule() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            rewards[0]["judge"]["url"] = server.url
            turnwise.train(config=CONFIG, rollout={"rewards": rewards}, **keys)  # type: ignore[arg-type]
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    main()
