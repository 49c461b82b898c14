"""Trainer to engine: the manifest of an update, its transport, and the check after it."""

BACKEND = "shm"
WORKER_EXTENSION = "turnwise.weights.vllm_extension.ShmWorkerExtension"
