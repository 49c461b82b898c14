"""Weights from trainer to engine: the manifest of an update, its transports, and its check."""

WORKER_EXTENSION = "turnwise.weights.vllm_worker.WorkerExtension"
