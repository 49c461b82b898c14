"""The kit as one file, for a machine without a network: `make gpu-pack`.

    python -m benchmarks.gpu.pack [FILE]

Packs the tracked files that the lines need: Turnwise, the benchmarks, the example's model. The
lines make their own models on the machine itself. Prints each part's size, and the packages that
have to be there.
"""

import io
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

from benchmarks.gpu.lines import LINES

ROOT = Path(__file__).parents[2]
PARTS = ("src", "benchmarks", "examples/__init__.py", "examples/calculator", "Makefile")
COMMIT = "benchmarks/gpu/COMMIT"
"""File of the pack that names its commit."""
LIMIT = 64 * 2**20
"""Bytes that the file may have."""


def commit() -> str:
    """Return the commit of the working tree, or of the pack that this is part of."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    packed = ROOT / COMMIT
    return described.stdout.strip() or (packed.read_text() if packed.exists() else "unknown")


def files() -> list[str]:
    """Return the tracked files of the kit."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *PARTS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def pack(path: Path) -> Counter[str]:
    """Write the kit; returns the bytes of each part."""
    sizes = Counter[str]()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name in files():
            archive.add(ROOT / name, f"turnwise/{name}")
            sizes[next(p for p in PARTS if name.startswith(p))] += (ROOT / name).stat().st_size
        text = commit().encode()
        entry = tarfile.TarInfo(f"turnwise/{COMMIT}")
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text))
    return sizes


def main() -> int:
    """Write the kit, and print what it holds."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "turnwise-gpu-kit.tar.gz"
    sizes = pack(path)
    for part, size in sizes.items():
        print(f"{part:24} {size / 2**20:6.1f} MiB")
    packed = path.stat().st_size
    print(f"{path}: {packed / 2**20:.1f} MiB")
    needed = dict.fromkeys(name for line in LINES for name in line.needs)
    print(f"packages that lines need: {', '.join(needed)}")
    print(f"there: tar xf {path.name} && make -C turnwise gpu-check")
    return int(packed > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
