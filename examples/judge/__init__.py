"""A judge in place of a reward: another model scores trajectories by a rubric."""
