"""The OpenAI-compatible server of one engine or of all engines."""
