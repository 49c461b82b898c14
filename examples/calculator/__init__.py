"""A small model learns to use a calculator: the data, the model, the tool and the reward."""
