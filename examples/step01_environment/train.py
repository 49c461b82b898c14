"""The same run without a configuration file.

python -m examples.step01_environment.train
"""

import turnwise
from examples.step01_environment.environment import Chain

rows = [{"a": 900 - a, "b": 300 + a, "c": 7 * a} for a in range(64)]

if __name__ == "__main__":
    turnwise.train(
        model="examples/calculator/warm_started",
        environment=Chain,
        data=rows,
        steps=10,
        name="step01",
        sampling={"max_tokens": 64},
        training={"learning_rate": 3e-4, "updates_per_step": 2},
        config={"model": {"max_length": 512}},
    )
