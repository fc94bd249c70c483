#!/bin/bash
# Start the ranks of one node with torchrun, for one of two programs:
#
#   launch/torchrun.sh train --config SETTINGS.yaml                  the embedded trainer
#   launch/torchrun.sh pretrain_gpt.py @ARGUMENTS --snip             a Megatron-LM script, unmodified
#   launch/torchrun.sh --cpu pretrain_gpt.py @ARGUMENTS --snip       the same without GPUs
#   launch/torchrun.sh --dry-run ...                                 print the command, run nothing
#
# On several nodes run it once a node, with SNIP_NODES, SNIP_NODE_RANK, MASTER_ADDR and MASTER_PORT
# set (slurm.sbatch does). Every other variable is in env.sh.
#
# SIGUSR1 to this script, or a file called .stop in the folder SNIP_CHECKPOINTS, makes the ranks write
# a checkpoint and end. The same command then resumes from it.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/env.sh
source "$here/env.sh"

usage() {
  echo "usage: ${0##*/} [--dry-run] train [FLAGS...]"
  echo "       ${0##*/} [--dry-run] [--cpu] SCRIPT.py [FLAGS...]"
}

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
  usage
  exit 0
fi

dry_run=0
if [ "${1:-}" = --dry-run ]; then
  dry_run=1
  shift
fi
program=${1:-}
if [ "$program" = --cpu ]; then program=${2:-}; fi

# Refuse flags for folders: a job that saves in one folder and loads from another would not resume.
refuse_folders() { # [ in FILE] WORD...
  local where=$1 word
  shift
  for word in "$@"; do
    case $word in
      --save | --save=* | --load | --load=*)
        echo "${0##*/}: checkpoints are in SNIP_CHECKPOINTS ($SNIP_CHECKPOINTS); drop $word$where" >&2
        exit 2
        ;;
    esac
  done
}
# Whether the script imports a training loop: Megatron-LM's `training`, or `bridge`.
imports() {
  grep -Eqs "^(from|import) megatron\.$1" "$program"
}

# Both programs have the same flags for folders. Megatron's scripts need a flag to handle a signal.
checkpoints=()
if [ -n "$SNIP_CHECKPOINTS" ]; then
  checkpoints=(--save "$SNIP_CHECKPOINTS" --load "$SNIP_CHECKPOINTS")
  refuse_folders "" "$@"
  for word in "$@"; do
    file=${word#@}
    # A pipe can be read once, by a rank.
    if [ "$file" != "$word" ] && [ -f "$file" ]; then
      mapfile -t words < <(words_of "$file")
      refuse_folders " in $file" "${words[@]}"
    fi
  done
fi
case $program in
  train) ;;
  *.py)
    if [ -n "$SNIP_CHECKPOINTS" ]; then
      if imports bridge && ! imports training; then
        echo "${0##*/}: '$program' is a script of Megatron-Bridge, which has no --save; start it as in docs/megatron-bridge.md" >&2
        exit 2
      fi
      checkpoints+=(--exit-signal-handler --exit-signal SIGUSR1)
    fi
    ;;
  *)
    usage >&2
    exit 2
    ;;
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
# A file that is there was for an earlier run. slurm.sbatch has removed it before its step, and sets
# SNIP_STOP_IS_CLEARED: a node that starts late must not remove the file that stops this run.
if [ -n "$SNIP_CHECKPOINTS" ] && [ -z "${SNIP_STOP_IS_CLEARED:-}" ]; then rm -f "$SNIP_CHECKPOINTS/.stop"; fi
# SIGUSR1 is for the ranks, torchrun's children, alone: torchrun and what ranks have started (W&B's
# service, the solver, writers of checkpoints) would die of it.
to_ranks() {
  local rank
  for rank in $(cat /proc/"$torchrun"/task/*/children 2>/dev/null || true); do
    kill -USR1 "$rank" 2>/dev/null || true
  done
}
watch() {
  until [ -e "$SNIP_CHECKPOINTS/.stop" ]; do sleep 2 >/dev/null 2>&1; done
  while :; do # again, for ranks that were still starting
    to_ranks
    sleep 20 >/dev/null 2>&1
  done
}

# Traps are set before torchrun starts; a signal that comes before its pid is known waits. If torchrun
# has ended by itself meanwhile there is nothing to signal, and its own status is what counts.
torchrun=
early=
interrupted=0
trap 'interrupted=1; if [ -n "$torchrun" ]; then to_ranks; else early=USR1; fi' USR1
trap 'interrupted=1; if [ -n "$torchrun" ]; then kill -TERM "$torchrun" 2>/dev/null || true; else early=TERM; fi' TERM INT HUP
# A rank ignores SIGUSR1 until it has set its handler; its default is to die.
(
  trap '' USR1
  exec "${command[@]}"
) &
torchrun=$!
case $early in
  USR1) to_ranks ;;
  TERM) kill -TERM "$torchrun" 2>/dev/null || true ;;
esac
watcher=
if [ -n "$SNIP_CHECKPOINTS" ]; then
  watch &
  watcher=$!
fi
while :; do # a signal ends `wait` early; asked again it gives torchrun's own status
  interrupted=0
  status=0
  wait "$torchrun" || status=$?
  if [ "$interrupted" = 0 ]; then break; fi
done
if [ -n "$watcher" ]; then kill "$watcher" 2>/dev/null || true; fi
exit "$status"
