"""Interfaces of other systems, built on Turnwise: their classes, files, keys and environments.

Lower layers do not import this package directly. A configuration names one of its modules
(`environment: trl:...`, `rollout.rewards: [{trl: ...}]`), and that module is imported by name.
"""
