"""The GPU kit: everything that only a GPU can show, as one table. `make gpu-check`

It needs torch and what `turnwise.config` needs; a line whose package is missing says so. It imports
no torch in its own process: each line runs in a process of its own.
"""
