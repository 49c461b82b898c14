"""Engines inside the trainer's processes."""
