"""Sandboxes elsewhere: a server on another machine, and classes for hosted services."""
