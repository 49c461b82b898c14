"""Serve the user's model, and train the player of `make guess` against it.

make guess
python -m examples.step06_simulated_user.train
"""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import turnwise
from examples.guess.environment import LARGEST, SMALLEST
from examples.guess.warm_start import BUILD

from .environment import AskedGuess
from .user import make_user

HERE = Path(__file__).parent


@contextmanager
def serving(model: Path) -> Iterator[str]:
    """Run `turnwise serve`; yields its base URL once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "turnwise.cli", "serve", str(HERE / "user.yaml")]
    keys = [f"model.path={model}", f"serving.port={port}"]
    with subprocess.Popen([*command, *keys], stdout=subprocess.PIPE, text=True) as server:
        try:
            for line in server.stdout or ():
                if f":{port}/v1" in line:
                    break
            else:
                raise SystemExit("the user's server ended before it answered")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()


def main(player: Path = BUILD / "model-seed0", user: Path = BUILD / "user") -> None:
    if not user.exists():
        print("training the user's model ...", flush=True)
        make_user(user)
    with serving(user) as url:
        turnwise.train(
            model=player,
            environment=AskedGuess,
            data=[{"number": n, "user_url": url} for n in range(SMALLEST, LARGEST + 1)],
            steps=10,
            name="step06",
            config=HERE / "config.yaml",
        )


if __name__ == "__main__":
    main()
