"""Environments that were written for other systems."""
