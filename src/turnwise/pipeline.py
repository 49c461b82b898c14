"""The former place of ChatLearn's names."""

raise ImportError("turnwise.pipeline is turnwise.compat.chatlearn now")
