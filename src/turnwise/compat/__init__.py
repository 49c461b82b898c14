"""Interfaces of other systems, built on Turnwise: their classes, files, keys and environments.

Lower layers do not import this package directly. A configuration names a part of it
(`environment: trl:...`, `rollout.rewards: [{trl: ...}]`), and that part is imported by name.
"""
