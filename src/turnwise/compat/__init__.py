"""Faces of other systems: their classes, files, keys and environments, on Turnwise's.

Nothing below this folder imports it. A configuration names what it needs (`environment: trl:...`,
`rollout.rewards: [{trl: ...}]`), and it is imported by that name.
"""
