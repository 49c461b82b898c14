"""Agents of other frameworks, as commands that know only a base URL and a row."""
