# Two images from one file:
#   docker build --target cpu -t megatron-snip:cpu .     # the laptop set-up, CPU and gloo
#   docker build --target gpu -t megatron-snip:gpu .     # on NVIDIA's PyTorch container (TE, apex)

ARG PYTORCH_IMAGE=nvcr.io/nvidia/pytorch:25.10-py3

FROM python:3.11.9-slim-bookworm AS cpu
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ libc6-dev make \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home snip
WORKDIR /opt/megatron-snip
COPY --chown=snip . .
RUN chown snip /opt/megatron-snip
USER snip
RUN make install
ENV PATH=/opt/megatron-snip/.venv/bin:$PATH
HEALTHCHECK --interval=5m --timeout=60s CMD ["megatron-snip", "doctor"]
CMD ["make", "demo"]

FROM ${PYTORCH_IMAGE} AS gpu
WORKDIR /opt/megatron-snip
COPY requirements/gpu.txt requirements/gpu.txt
# torch, Transformer Engine and apex are the container's own: nothing here may replace them.
RUN python -m pip install --no-cache-dir -r requirements/gpu.txt
COPY . .
RUN python -m pip install --no-cache-dir --no-deps . \
    && useradd --create-home snip
USER snip
WORKDIR /workspace
HEALTHCHECK --interval=5m --timeout=60s CMD ["megatron-snip", "doctor"]
CMD ["megatron-snip", "--help"]
