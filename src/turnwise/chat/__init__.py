"""Chats as text: templates, tool calls in answers, and sessions."""
