"""Reports of a run about itself, and checks before it: for people, files and other programs."""
