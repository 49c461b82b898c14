"""Trainer to engine: the manifest of an update, its transports, and the check after it."""

BACKEND = "turnwise"
WORKER_EXTENSION = "turnwise.weights.vllm_extension.WorkerExtension"
