"""Agents of other frameworks as commands, which know a base URL and a row."""
