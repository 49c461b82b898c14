"""Reports of a run, and checks before it, for people, files and other programs."""
