"""Interfaces of other systems, built on Turnwise: their classes, files, keys and environments.

Lower layers do not import this package directly. A configuration names one of its modules
(`environment: trl:...`, `rollout.rewards: [{trl: ...}]`), and that module is imported by name.

To add the environments of another system: write a file here with a function that returns the
environment of an address, and register it in `ADAPTERS` of `rollouts/environment.py`.
"""
