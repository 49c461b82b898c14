"""Former module of ChatLearn's names; importing it raises an error that names the new one."""

raise ImportError("turnwise.pipeline is turnwise.compat.chatlearn now")
