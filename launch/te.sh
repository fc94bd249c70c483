#!/bin/sh
# Brings Transformer Engine to a GPU machine that has PyTorch and nvcc but no network.
#
#   sh launch/te.sh pieces DIR          with a network: download, and split into files below 50 MB
#   (copy DIR there, in one go or file by file)
#   sh launch/te.sh build DIR TARGET    there: join, check, compile the extension into TARGET
#   sh launch/te.sh test TARGET         there: the cases of tests/te that need no stand-in
#
# PYTHON is a Python 3.12 with PyTorch, on both machines: the source package asks for it.
# The build was tried without a GPU alone (PyTorch 2.15, CUDA 13.0); it takes 13 core minutes.
set -eu

TE_VERSION=${TE_VERSION:-2.20.2}
CUDA_MAJOR=${CUDA_MAJOR:-13}
PYTHON=${PYTHON:-python3}

pieces() {
  mkdir -p "$1"
  pip="$PYTHON -m pip download --quiet --no-deps --dest $1"
  $pip --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
    "transformer_engine==$TE_VERSION" "transformer_engine_cu$CUDA_MAJOR==$TE_VERSION"
  NVTE_FRAMEWORK=pytorch $pip --no-build-isolation --no-binary transformer_engine_torch \
    "transformer_engine_torch==$TE_VERSION"
  cd "$1"
  sha256sum ./*.whl ./*.tar.gz >SHA256SUMS
  for wheel in ./*.whl; do
    split --bytes 50000000 --numeric-suffixes "$wheel" "$wheel.part" && rm "$wheel"
  done
  du -ch ./*
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
  $PYTHON -m pip install --quiet --no-deps --no-index --target "$target" ./*.whl
  site=$($PYTHON -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
  [ -x "$CUDA_HOME/bin/nvcc" ] || { echo "te.sh: no $CUDA_HOME/bin/nvcc; set CUDA_HOME" && exit 1; }
  CPATH=$CUDA_HOME/include:$CUDA_HOME/include/cccl  # before PyTorch's, which lack a part
  for folder in "$site"/nvidia/*/; do
    CPATH=$CPATH:${folder}include:${folder}include/cccl
    LIBRARY_PATH=${LIBRARY_PATH:-}:${folder}lib
  done
  export CPATH LIBRARY_PATH CUDA_HOME
  export NVTE_FRAMEWORK=pytorch MAX_JOBS="${MAX_JOBS:-$(nproc)}" PYTHONPATH="$target:${PYTHONPATH:-}"
  $PYTHON -m pip install --no-deps --no-index --no-build-isolation --target "$target" ./*.tar.gz
  $PYTHON -c 'import transformer_engine.pytorch as te; print("built", te.__file__)'
}

tests() {
  PYTHONPATH="$1:${PYTHONPATH:-}" SNIP_TE_REAL=1 \
    $PYTHON -m pytest -q -p no:cacheprovider -m real_te tests/te
}

case "${1:-}" in
  pieces) pieces "$2" ;;
  build) build "$2" "$3" ;;
  test) tests "$2" ;;
  *) sed -n '2,12p' "$0" && exit 2 ;;
esac
