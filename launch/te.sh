#!/bin/sh
# Brings Transformer Engine to a GPU machine that has PyTorch and nvcc but no network.
#
#   sh launch/te.sh pieces DIR          with a network: download, and split into files below 50 MB
#   (copy DIR there, in one go or file by file)
#   sh launch/te.sh build DIR TARGET    there: join, check, compile the extension into TARGET
#   sh launch/te.sh test TARGET         there: the cases of tests/te that run on a GPU as well
#
# PYTHON is a Python 3.12 with PyTorch for CUDA, on both machines; `pieces` needs `wheel`, too: the
# source package asks for them. The extension fits one PyTorch: for another delete
# DIR/transformer_engine_torch-* but the .tar.gz.
# Ran from pieces to import without a GPU (PyTorch 2.15, nvcc 13.0): 23 minutes on two shared cores.
set -eu

TE_VERSION=${TE_VERSION:-2.20.2}
CUDA_MAJOR=${CUDA_MAJOR:-13}
PYTHON=${PYTHON:-python3}

download() { # DIR WORD...
  folder=$1
  shift
  "$PYTHON" -m pip download --quiet --dest "$folder" "$@"
}

pieces() {
  mkdir -p "$1"
  download "$1" --only-binary :all: --no-deps \
    "transformer_engine==$TE_VERSION" "transformer_engine_cu$CUDA_MAJOR==$TE_VERSION"
  case $CUDA_MAJOR in 12) curand=nvidia-curand-cu12 ;; *) curand=nvidia-curand ;; esac
  # It imports the first three and loads the fourth; the last two build it.
  download "$1" --only-binary :all: einops onnxscript pydantic "$curand" ninja wheel
  NVTE_FRAMEWORK=pytorch download "$1" --no-deps --no-build-isolation \
    --no-binary transformer_engine_torch "transformer_engine_torch==$TE_VERSION"
  cd "$1"
  rm -f numpy-*.whl sympy-*.whl mpmath-*.whl # PyTorch's own stay
  sha256sum ./*.whl ./*.tar.gz >SHA256SUMS
  for wheel in ./*.whl; do
    split --bytes 50000000 --numeric-suffixes "$wheel" "$wheel.part" && rm "$wheel"
  done
  du -ch ./*
}

install() { # WHEEL...
  "$PYTHON" -m pip install --quiet --no-deps --no-index --upgrade --target "$target" "$@"
}

build() {
  mkdir -p "$2"
  target=$(cd "$2" && pwd)
  cd "$1"
  for first in ./*.part00; do
    if [ -e "$first" ]; then
      cat "${first%00}"[0-9][0-9] >"${first%.part00}" && rm "${first%00}"[0-9][0-9]
    fi
  done
  sha256sum --check --quiet SHA256SUMS
  install ./*.whl
  PYTHONPATH=$target:${PYTHONPATH:-} PATH=$target/bin:$PATH
  export PYTHONPATH PATH
  ls transformer_engine_torch-*.whl 2>/dev/null || compile
  install ./transformer_engine*.whl # at once: pip replaces the folder that they share
  CURAND_HOME=$target/nvidia "$PYTHON" -c \
    'import torch, transformer_engine.pytorch as te; print("built", te.__file__)'
}

compile() {
  site=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
  [ -x "$CUDA_HOME/bin/nvcc" ] || { echo "te.sh: no $CUDA_HOME/bin/nvcc; set CUDA_HOME" && exit 1; }
  CPATH=$CUDA_HOME/include:$CUDA_HOME/include/cccl  # before PyTorch's, which lack a part
  for folder in "$site"/nvidia/*/; do
    CPATH=$CPATH:${folder}include:${folder}include/cccl
    LIBRARY_PATH=${LIBRARY_PATH:-}:${folder}lib
  done
  export CPATH LIBRARY_PATH CUDA_HOME
  export NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS="${MAX_JOBS:-$(nproc)}"
  tar -xzf "transformer_engine_torch-$TE_VERSION.tar.gz"
  "$PYTHON" -m pip wheel --no-deps --no-index --no-cache-dir --no-build-isolation \
    "./transformer_engine_torch-$TE_VERSION"
}

tests() {
  target=$(cd "$1" && pwd)
  cd "$(dirname "$0")/.."
  CURAND_HOME=$target/nvidia PYTHONPATH="$target:${PYTHONPATH:-}" SNIP_TE_REAL=1 \
    "$PYTHON" -m pytest -q -p no:cacheprovider -m real_te tests/te
}

case "${1:-}" in
  pieces) pieces "${2:?a folder DIR}" ;;
  build) build "${2:?a folder DIR}" "${3:?a folder TARGET}" ;;
  test) tests "${2:?a folder TARGET}" ;;
  *) sed -n '2,12p' "$0" && exit 2 ;;
esac
