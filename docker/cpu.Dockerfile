# Turnwise on CPUs. Its commands are those of a fresh clone, which CI runs; the image itself was not
# built by the project, which had no Docker daemon.
#
#   docker build -f docker/cpu.Dockerfile -t turnwise:cpu .
#   docker run --rm --shm-size=4g turnwise:cpu make demo
FROM python:3.11-slim-bookworm

# make runs the project's commands, vLLM's CPU build loads libnuma, and torch compiles with g++.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ git libnuma1 make \
 && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home turnwise
USER turnwise
WORKDIR /home/turnwise/turnwise

# The requirements change less often than the source: they are a layer of their own.
COPY --chown=turnwise Makefile pyproject.toml README.md LICENSE ./
COPY --chown=turnwise requirements requirements
COPY --chown=turnwise src src
RUN make setup

COPY --chown=turnwise . .
ENV PATH=/home/turnwise/turnwise/.venv/bin:$PATH
CMD ["turnwise", "--help"]
