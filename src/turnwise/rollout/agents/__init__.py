"""Agents that are given a base URL: commands, HTTP endpoints, long-lived workers."""
