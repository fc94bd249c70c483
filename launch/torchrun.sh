#!/bin/bash
# Start the ranks of one node with torchrun, for one of two programs:
#
#   launch/torchrun.sh train --config configs/demo.yaml              the embedded trainer
#   launch/torchrun.sh pretrain_gpt.py @ARGUMENTS --snip             a Megatron-LM script, unmodified
#   launch/torchrun.sh --cpu pretrain_gpt.py @ARGUMENTS --snip       the same without GPUs
#   launch/torchrun.sh --dry-run ...                                 print the command, run nothing
#
# On several nodes run it once a node, with SNIP_NODES, SNIP_NODE_RANK, MASTER_ADDR and MASTER_PORT
# set (slurm.sbatch does). Every other variable is in env.sh.
#
# SIGUSR1 to all processes (torchrun itself ignores it) makes the ranks write a checkpoint and end
# well, where SNIP_CHECKPOINTS names a folder; run again, the command goes on from there.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/env.sh
source "$here/env.sh"

usage() {
  echo "usage: ${0##*/} [--dry-run] train [FLAGS...]" >&2
  echo "       ${0##*/} [--dry-run] [--cpu] SCRIPT.py [FLAGS...]" >&2
  exit 2
}

dry_run=0
if [ "${1:-}" = --dry-run ]; then
  dry_run=1
  shift
fi
program=${1:-}
if [ "$program" = --cpu ]; then program=${2:-}; fi

# Both programs name their folders alike; Megatron's scripts heed a signal only if told to.
checkpoints=()
if [ -n "$SNIP_CHECKPOINTS" ]; then
  checkpoints=(--save "$SNIP_CHECKPOINTS" --load "$SNIP_CHECKPOINTS")
  for word in "$@"; do
    case $word in
      --save | --save=* | --load | --load=*)
        # What is saved in one folder and loaded from another does not go on by itself.
        echo "${0##*/}: checkpoints are in SNIP_CHECKPOINTS ($SNIP_CHECKPOINTS); drop $word" >&2
        exit 2
        ;;
    esac
  done
fi
case $program in
  train) ;;
  *.py)
    if [ -n "$SNIP_CHECKPOINTS" ]; then
      checkpoints+=(--exit-signal-handler --exit-signal SIGUSR1)
    fi
    ;;
  *) usage ;;
esac

command=("$SNIP_PYTHON" -m torch.distributed.run --nproc-per-node "$SNIP_RANKS_PER_NODE")
if [ "$SNIP_NODES" -eq 1 ]; then
  command+=(--standalone)
else
  # Static: rank 0 is on node 0, whichever node comes first, and logs are where they are expected.
  : "${MASTER_ADDR:?names the host of node 0}" "${MASTER_PORT:?is a free port of node 0}"
  command+=(--nnodes "$SNIP_NODES" --node-rank "$SNIP_NODE_RANK")
  command+=(--master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
fi
command+=(-m megatron_snip "$@" "${checkpoints[@]}")

if [ "$dry_run" = 1 ]; then
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi
# What is ignored at exec stays ignored in torchrun, whose default is to die; ranks set a handler.
trap '' USR1
exec "${command[@]}"
