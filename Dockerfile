# Two images from one file:
#   docker build --target cpu -t megatron-snip:cpu .     # the laptop set-up: CPU and gloo, make demo
#   docker build --target gpu -t megatron-snip:gpu .     # on NVIDIA's PyTorch container (TE, apex)
#
# The gpu image holds no training script: mount a Megatron-LM checkout and the data below /workspace.
#   docker run --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD:/workspace" megatron-snip:gpu \
#     torchrun --nproc-per-node 8 -m megatron_snip pretrain_gpt.py @ARGUMENTS --snip

# The container that Megatron-Core 0.16 is built and tested in.
ARG PYTORCH_IMAGE=nvcr.io/nvidia/pytorch:25.11-py3

FROM python:3.11.9-slim-bookworm AS cpu
# make alone: no package is compiled here.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --no-log-init --uid 10001 snip \
    && install --directory --owner=snip /opt/megatron-snip
WORKDIR /opt/megatron-snip
COPY --chown=snip . .
USER 10001
# torch without CUDA, which is a tenth of the size; the version is still lock.txt's.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu PIP_NO_CACHE_DIR=1
RUN make install
ENV PATH=/opt/megatron-snip/.venv/bin:$PATH
HEALTHCHECK --interval=5m --timeout=60s CMD ["megatron-snip", "doctor"]
CMD ["make", "demo"]

# hadolint ignore=DL3006
FROM ${PYTORCH_IMAGE} AS gpu
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/snip/bin:$PATH PIP_NO_CACHE_DIR=1
WORKDIR /opt/megatron-snip
COPY . .
RUN launch/container_venv.sh /opt/snip \
    && useradd --create-home --no-log-init --uid 10001 snip
USER 10001
WORKDIR /workspace
# Not `doctor` as above: every five minutes it would take a core beside the ranks, and initialize CUDA.
HEALTHCHECK NONE
CMD ["megatron-snip", "--help"]
