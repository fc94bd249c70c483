#!/usr/bin/env bash
# Installs megatron-snip in NVIDIA's PyTorch or NeMo container, in a venv above the container's Python.
#
#   launch/container_venv.sh VENV       in the container; needs a network once
#   source VENV/bin/activate
#   torchrun --nproc-per-node 8 -m megatron_snip pretrain_gpt.py ARGS --snip
#
# The container keeps its torch, Transformer Engine, apex and, in the NeMo container, Megatron-Core.
# Nothing outside of VENV changes. Put VENV on a file system that all nodes see: it works in every
# container of the same image.
set -eu

[ $# -eq 1 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
venv=$1
snip=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
# The container's own constraint file holds versions of packages that SNIP needs newer.
export PIP_CONSTRAINT='' PIP_DISABLE_PIP_VERSION_CHECK=1

version() { # DISTRIBUTION: its version in the container's Python, or nothing
  "$python" -c 'import importlib.metadata as m, sys
try: print(m.version(sys.argv[1]))
except m.PackageNotFoundError: pass' "$1"
}

torch=$(version torch)
[ -n "$torch" ] || { echo "$python has no torch: this is no container of NVIDIA's. Outside of one: pip install -e '.[megatron,report]'" >&2; exit 2; }
te=$(version transformer_engine)
megatron=$(version megatron-core)
echo "the container has torch $torch, Transformer Engine ${te:-(none)}, megatron-core ${megatron:-(none)}"
case ${te:-0} in
  0) echo "without Transformer Engine only --snip-backend simulate runs" >&2 ;;
  1.* | 2.[0-7] | 2.[0-7].*) echo "Transformer Engine 2.8 is the oldest that SNIP knows; take a newer container" >&2; exit 2 ;;
esac

"$python" -m venv --system-site-packages "$venv" || {
  echo "could not make a venv; as root before: apt-get install python3-venv" >&2; exit 2; }
wanted=$(mktemp)
trap 'rm -f "$wanted"' EXIT
# An entry is a line `NAME==VERSION \` and its hashes, which are indented.
awk -v skip="${megatron:+megatron-core}" \
  '/^[^ ]/ { name = $1; sub(/==.*/, "", name) } skip == "" || name != skip' \
  "$snip/requirements/gpu.txt" >"$wanted"
"$venv/bin/python" -m pip install --quiet --require-hashes --only-binary :all: --no-deps -r "$wanted"
"$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation "$snip"
# The container's torchrun would run the container's Python, which misses the packages above.
printf '#!/bin/sh\nexec "%s" -m torch.distributed.run "$@"\n' "$(cd "$venv" && pwd)/bin/python" >"$venv/bin/torchrun"
chmod 755 "$venv/bin/torchrun"
"$venv/bin/megatron-snip" --version
echo "now: source $venv/bin/activate && megatron-snip doctor"
