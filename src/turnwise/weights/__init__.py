"""Weights from trainer to engine: the manifest of an update, its transports, and its check."""

BACKEND = "turnwise"
WORKER_EXTENSION = "turnwise.weights.vllm_worker.WorkerExtension"
