"""What a measured iteration costs over an ordinary one in a script of Megatron-LM, as users run it.

    python -m benchmarks.script pretrain_gpt.py [--rounds 14] [--width 512] [--samples 4]

runs `python -m megatron_snip --cpu pretrain_gpt.py ... --snip-collect-only` in this process, on
mock data, with a Python that has megatron.training (3.12; `make test-megatron` makes
.venv-megatron). From iteration 13 on each second iteration measures all linears. A ratio is that of
an iteration that measures to the ordinary one behind it, in CPU seconds of Megatron's `train_step`
on one thread. The result is the median over the pairs, with its 95 % interval.
`benchmarks.refresh` measures the same in this project's own training loop, with memory, and on
GPUs.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core, whatever else the machine does

from benchmarks.machine import RESULTS, append_row
from benchmarks.refresh import median_interval
from megatron_snip.__main__ import main as megatron_snip
from tests.distributed.launch import free_port
from tests.megatron.lab import CPU

FIRST_MEASURED = 13
"""After the first iterations, which are slower."""

MODEL = """
    --num-layers 4 --num-attention-heads 8 --position-embedding-type rope --bf16
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --hidden-dropout 0 --attention-dropout 0 --lr 1e-3 --lr-warmup-iters 2
    --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-workers 0
    --log-interval 1 --eval-interval 1000 --eval-iters 0
"""


def train_step_seconds(words: list[str]) -> list[float]:
    """Run `python -m megatron_snip` with these words; return the CPU seconds of each train_step."""
    seconds: list[float] = []
    from megatron.training import training

    original = training.train_step

    @functools.wraps(original)  # SNIP binds arguments by the signature
    def train_step(*args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        result = original(*args, **kwargs)
        seconds.append(time.process_time() - begin)
        return result

    training.train_step = train_step
    command_line = sys.argv  # the script gets its own
    status = megatron_snip(words)
    sys.argv = command_line
    if status:
        raise SystemExit(status)
    return seconds


def main() -> int:
    """Run, print the result, append a row of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("script", help="pretrain_gpt.py of a clone of Megatron-LM")
    parser.add_argument("--rounds", type=int, default=14, help="pairs of iterations that are timed")
    parser.add_argument("--width", type=int, default=512, help="hidden size; the MLP has twice it")
    parser.add_argument("--samples", type=int, default=4, help="of a microbatch, 256 tokens each")
    parser.add_argument("--output", type=Path, default=RESULTS / "script.jsonl", metavar="FILE")
    args = parser.parse_args()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    num_iterations = FIRST_MEASURED - 1 + 2 * args.rounds
    with tempfile.TemporaryDirectory() as folder:
        flags = f"""{MODEL} {CPU} --hidden-size {args.width} --ffn-hidden-size {2 * args.width}
            --seq-length 256 --max-position-embeddings 256 --micro-batch-size {args.samples}
            --global-batch-size {args.samples} --train-iters {num_iterations}
            --snip --snip-collect-only --snip-formats fp8,fp4 --snip-start-step {FIRST_MEASURED}
            --snip-interval 2 --snip-lag 1 --snip-output-dir {folder}"""
        seconds = train_step_seconds(["--cpu", args.script, *flags.split()])
    measured = seconds[FIRST_MEASURED - 1 :: 2]
    ordinary = seconds[FIRST_MEASURED::2]
    ratios = [m / o for m, o in zip(measured, ordinary, strict=True)]
    result = {
        "width": args.width,
        "tokens": 256 * args.samples,
        "iteration_s": statistics.median(ordinary),
        "measured_s": statistics.median(measured),
        "ratio": statistics.median(ratios),
        "ratio_interval": median_interval(ratios),
    }
    append_row(args.output, result)
    print(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
