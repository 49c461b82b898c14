"""Processes, threads, deadlines and logs; imports only config, errors and internals of turnwise."""
