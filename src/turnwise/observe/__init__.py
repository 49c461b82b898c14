"""What a run says about itself, and what it will need: for people, files and other programs."""
