# NEVER BUILT AND NEVER RUN by the project, which had no machine with a GPU and Docker: a starting
# point. It takes vLLM's image, whose CUDA, torch and kernels fit each other, and adds turnwise.
#
#   docker build -f docker/gpu.Dockerfile -t turnwise:gpu .
#   docker run --rm --gpus all --ipc=host turnwise:gpu turnwise --help
FROM vllm/vllm-openai:v0.32.0

WORKDIR /opt/turnwise
COPY pyproject.toml README.md LICENSE ./
COPY src src
# The image has vLLM and torch: nothing of theirs may be replaced.
RUN python3 -c "import vllm, torch; print(f'vllm=={vllm.__version__}\ntorch=={torch.__version__}')" > /tmp/have.txt \
 && python3 -m pip install --no-cache-dir --constraint /tmp/have.txt '.[data,tensorboard,plots]'

ENTRYPOINT []
CMD ["turnwise", "--help"]
