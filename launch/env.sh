# shellcheck shell=bash
# Environment of a training job: every variable with its reason. torchrun.sh and slurm.sbatch source
# this file; what is set already stays as it is.

# Print the words of an argument file, one per line. megatron_snip/cli/script.py reads it for the ranks:
# quotes are a shell's, and outside them # begins a comment.
words_of() {
  sed -E "s/^(([^#\"']|\"[^\"]*\"|'[^']*')*)#.*/\1/" "$1" | xargs printf '%s\n'
}

# ---- what the scripts read -----------------------------------------------------------------------

# The Python that has megatron-snip installed.
export SNIP_PYTHON="${SNIP_PYTHON:-python3}"

# Ranks on a node: one per GPU that CUDA_VISIBLE_DEVICES names, or else that the node has. Without GPUs,
# or where CUDA_VISIBLE_DEVICES is set and names none, the number of gloo ranks to start: one.
if [ -z "${SNIP_RANKS_PER_NODE:-}" ]; then
  SNIP_RANKS_PER_NODE=1
  if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
    if [ ${#visible[@]} -gt 0 ]; then SNIP_RANKS_PER_NODE=${#visible[@]}; fi
  elif [ "${SLURM_GPUS_ON_NODE:-0}" -gt 0 ]; then
    SNIP_RANKS_PER_NODE=$SLURM_GPUS_ON_NODE
  elif command -v nvidia-smi >/dev/null; then
    # A node whose driver is down must not start a rank without a GPU: its peers would wait for the others.
    if ! gpus=$(nvidia-smi --list-gpus); then
      echo "env.sh: nvidia-smi finds no GPU: ${gpus%%$'\n'*}; to start ranks without one set SNIP_RANKS_PER_NODE" >&2
      exit 2
    fi
    SNIP_RANKS_PER_NODE=$(awk '/^GPU / { count++ } END { print count + 0 }' <<<"$gpus") # MIG has lines of its own
  fi
fi
export SNIP_RANKS_PER_NODE

# Nodes of the job, and which of them this is (0-based). slurm.sbatch sets the first, Slurm the second.
export SNIP_NODES="${SNIP_NODES:-1}"
export SNIP_NODE_RANK="${SNIP_NODE_RANK:-${SLURM_NODEID:-0}}"

# Folder of checkpoints: the job resumes from the latest one and saves to it, also before a time limit.
# Empty: only the checkpoints that the command line asks for.
export SNIP_CHECKPOINTS="${SNIP_CHECKPOINTS:-}"

# Container of the job's steps under Slurm: an image for pyxis, or an apptainer file (*.sif). Empty:
# none. Mounts are SOURCE:TARGET[,SOURCE:TARGET...]; the working directory is always mounted,
# data and checkpoints elsewhere are not.
export SNIP_CONTAINER="${SNIP_CONTAINER:-}"
export SNIP_CONTAINER_MOUNTS="${SNIP_CONTAINER_MOUNTS:-}"

# Network interface between nodes, e.g. eth0. Gloo (plans, votes, checkpoint metadata) otherwise takes
# the one that the host's name resolves to, and NCCL chooses one; other nodes may not reach them.
if [ -n "${SNIP_INTERFACE:-}" ]; then
  export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$SNIP_INTERFACE}"
  export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$SNIP_INTERFACE}"
fi

# ---- what torch and Megatron read ----------------------------------------------------------------

# Before Blackwell, tensor parallelism relies on communication kernels being launched before the GEMMs
# that they overlap with; one hardware queue keeps that order, and Megatron insists on it. With FSDP it
# insists on more than one. Megatron-Bridge's recipes for overlapped experts set 32.
words="$*"
for word in "$@"; do # a pipe can be read once, by a rank, which also reports an open quote
  if [[ $word == @* && -f ${word#@} ]]; then words+=" $(words_of "${word#@}" 2>/dev/null | tr '\n' ' ' || true)"; fi
done
case " $words " in
  *" --use-megatron-fsdp "* | *" --use-torch-fsdp2 "*) ;;
  *) export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}" ;;
esac

# torch starts a thread a core in every rank otherwise, and ranks share the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# A killed job keeps its last log lines.
export PYTHONUNBUFFERED="${PYTHONUNBUFFERED:-1}"

# Seconds between torchrun's SIGTERM and SIGKILL to its ranks (30 by default): time to write a
# checkpoint when a job is cancelled. Slurm's own KillWait may be shorter; torch before 2.12 waits 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"
