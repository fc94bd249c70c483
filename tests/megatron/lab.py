"""The tiny training of this tier, under several layouts; runs are made once and shared by tests."""

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.distributed.launch import ROOT, Run, Server, free_port

SCRIPT = str(ROOT / "tests" / "megatron" / "pretrain_tiny.py")

ITERATIONS = 10

MODEL = f"""
    --num-layers 4 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8
    --train-iters {ITERATIONS} --lr 3e-3 --lr-warmup-iters 2 --bf16
    --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 1
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --hidden-dropout 0 --attention-dropout 0 --log-interval 1 --eval-interval 5 --eval-iters 1
    --num-workers 0
"""

CPU = """
    --transformer-impl local --distributed-backend gloo --use-cpu-initialization
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion
    --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm
"""
"""What `--cpu` makes the default."""

SNIP = ["--snip", "--snip-interval", "4", "--snip-start-step", "3", "--snip-lag", "2"]
SNIP += ["--snip-efficiency-target", "0.5"]
"""Refreshes at iterations 3 and 7; plans are applied before iterations 5 and 9."""

COLLECT_ONLY = [*SNIP, "--snip-collect-only"]
"""Measures as often, and stays in BF16."""

PP2 = ["--pipeline-model-parallel-size", "2"]
OVERLAP = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
EXPERTS = ["--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-router-topk", "2"]
EXPERTS += ["--moe-ffn-hidden-size", "128", "--moe-router-force-load-balancing"]
FSDP2 = ["--use-torch-fsdp2", "--ckpt-format", "torch_dcp"]
MEGATRON_FSDP = ["--use-megatron-fsdp", "--use-distributed-optimizer", "--ckpt-format"]
MEGATRON_FSDP += ["fsdp_dtensor", "--data-parallel-sharding-strategy", "optim_grads_params"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "tp2": (2, ["--tensor-model-parallel-size", "2"]),
    "pp2": (2, PP2),
    "dp2": (2, OVERLAP),
    "vpp2": (2, [*PP2, "--num-virtual-stages-per-pipeline-rank", "2"]),
    "ep2": (2, EXPERTS),
    "fsdp2": (2, FSDP2),
    "megatron-fsdp": (2, MEGATRON_FSDP),
    "one megatron-fsdp": (1, MEGATRON_FSDP),
}
"""Ranks and flags."""

TE = ["--transformer-impl", "transformer_engine"]
MAMBA = ["--mamba-num-groups", "2", "--mamba-state-dim", "16", "--mamba-head-dim", "32"]
LATENT = ["--multi-latent-attention", "--q-lora-rank", "64", "--kv-lora-rank", "64"]
LATENT += ["--v-head-dim", "32", "--qk-head-dim", "32", "--qk-pos-emb-head-dim", "32"]
DSA = [*LATENT, "--dsa-indexer-n-heads", "4", "--dsa-indexer-head-dim", "64"]
DSA += ["--dsa-indexer-topk", "16", "--no-dsa-indexer-rotate-activation"]
DELTA_NET = ["--linear-key-head-dim", "8", "--linear-value-head-dim", "8"]
DELTA_NET += ["--linear-num-key-heads", "16", "--linear-num-value-heads", "16"]
MTP = ["--position-embedding-type", "rope"]
WITH_TE = {
    "te": (1, TE),
    "te dp2": (2, [*TE, *OVERLAP]),
    "te dist-opt2": (2, [*TE, "--use-distributed-optimizer"]),
    "te pp2": (2, [*TE, *PP2]),
    "te vpp2": (2, [*TE, *PP2, "--num-virtual-stages-per-pipeline-rank", "2"]),
    "te embedding alone": (2, [*TE, *PP2, "--pipeline-model-parallel-layout", "E|ttttL"]),
    "te first stage short": (2, [*TE, *PP2, "--decoder-first-pipeline-num-layers", "1"]),
    "te last stage short": (2, [*TE, *PP2, "--decoder-last-pipeline-num-layers", "1"]),
    "te embedding and loss as layers": (
        2,
        [
            *(*TE, *PP2, "--num-layers", "6"),
            *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
        ],
    ),
    "te prediction alone": (
        4,
        [
            *(*TE, "--pipeline-model-parallel-size", "4", *MTP, "--mtp-num-layers", "1"),
            *("--pipeline-model-parallel-layout", "Et|ttt|m|L"),
        ],
    ),
    "te ep2": (2, [*TE, *EXPERTS, "--moe-grouped-gemm", "--moe-token-dispatcher-type", "alltoall"]),
    "te fsdp2": (2, [*FSDP2, *TE]),
    "te megatron-fsdp": (2, [*MEGATRON_FSDP, *TE]),
    "te tp2": (2, [*LAYOUTS["tp2"][1], *TE, "--sequence-parallel"]),
    "cp2": (2, [*TE, "--context-parallel-size", "2"]),
    "one hybrid": (1, [*TE, *MAMBA, *OVERLAP, "--hybrid-layer-pattern", "M*-M"]),
    "hybrid": (2, [*LAYOUTS["tp2"][1], *TE, *MAMBA, "--hybrid-layer-pattern", "M*-M"]),
    "hybrid-aligned": (
        2,
        [
            *(*LAYOUTS["tp2"][1], *TE, "--sequence-parallel", *MAMBA, "--mamba-head-dim", "4"),
            *("--hybrid-layer-pattern", "M*-M"),
        ],
    ),
    "hybrid-pp2": (2, [*LAYOUTS["pp2"][1], *TE, *MAMBA, "--hybrid-layer-pattern", "M*|-M"]),
    "delta-net": (1, [*TE, *DELTA_NET, "--hybrid-layer-pattern", "G*-G"]),
    "dsa": (1, [*TE, *DSA, "--hybrid-layer-pattern", "D-D-"]),
    "mtp": (2, [*LAYOUTS["pp2"][1], *MTP, "--mtp-num-layers", "1"]),
    "mtp-repeated": (1, [*MTP, "--mtp-num-layers", "2", "--mtp-use-repeated-layer"]),
    "latent": (2, [*LAYOUTS["tp2"][1], *TE, *LATENT]),
}
"""Layouts and models on Transformer Engine, or with the stand-ins of `tests/stand_ins`."""


class Lab:
    """Runs the training in many ways, each once."""

    def __init__(self, folder: Path, *before: Path, with_te: bool = False) -> None:
        """Ranks import from the folders `before` first; with_te: they find Transformer Engine."""
        preload = ["tests.te_on_cpu.installed"] if with_te else []
        self._server = Server(*before, preload=[*preload, "tests.megatron.script"])
        self.folder = folder
        self._runs: dict[Any, Run] = {}

    def run(
        self,
        layout: str,
        flags: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        plain: bool = False,
        script: str = SCRIPT,
    ) -> Run:
        """Return how a run in a layout ended; `plain` is without this package's runner."""
        environment = environment or {}
        if "fsdp" in layout:  # Megatron refuses the 1 that other layouts need
            environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", **environment}
        case = (layout, *flags, *sorted(environment.items()), plain, script)
        if case not in self._runs:
            ranks, parallel = {**LAYOUTS, **WITH_TE}[layout]
            start = [script, *CPU.split()] if plain else ["--cpu", script]
            words = [*start, *MODEL.split(), *parallel, *flags]
            if "--save" in flags:
                output = Path(flags[flags.index("--save") + 1]) / "snip"
            else:
                output = self.folder / f"run-{len(self._runs)}"
                words += ["--snip-output-dir", str(output)] if "--snip" in flags else []
            run = self.run_words(ranks, words, environment, plain)
            self._runs[case] = dataclasses.replace(run, output=output)
        return self._runs[case]

    def run_words(
        self, ranks: int, words: Sequence[str], environment: dict[str, str], plain: bool
    ) -> Run:
        """Run `python -m megatron_snip WORDS`, or `python WORDS` with the CPU patch alone."""
        environment = {**environment, "MASTER_PORT": str(free_port())}
        arguments = {"words": words, "environment": environment, "plain": plain}
        return self._server.run(ranks, "tests.megatron.script:run_script", arguments)

    def close(self) -> None:
        self._server.close()

    def output(self, name: str) -> Path:
        return self.folder / name

    def planned(self, layout: str) -> Run:
        """The run with SNIP that most tests look at, saving at iteration 7."""
        return self.run(layout, [*SNIP, *saving(self.output(f"planned-{layout}"))])


def saving(directory: Path, at: int = 7) -> list[str]:
    """Flags that save after `at` iterations (and at the end)."""
    return ["--save", str(directory), "--save-interval", str(at)]


def weights(run: Run) -> list[str]:
    """The digest of every rank's weights at the end of a run that ended well."""
    return [result["weights"] for result in run.finished()]


def logged(run: Run, what: str = "lm loss") -> dict[int, str]:
    """{iteration: value} in the last rank's log."""
    pattern = re.compile(rf"iteration +(\d+)/.*?\| {what}: (\S+)")
    return {int(number): value for number, value in pattern.findall(run.logs[-1])}


def snip_lines(run: Run) -> list[str]:
    """Lines of this package's log on rank 0."""
    return [line for line in run.logs[0].splitlines() if "megatron_snip" in line]


def applied_plans(run: Run) -> list[int]:
    """Iterations at which a plan was applied, in rank 0's log."""
    return [
        int(i)
        for i in re.findall(r"snip: iteration (\d+): plan (?:applied|unchanged)", run.logs[0])
    ]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def killed(lab: Lab, layout: str, *flags: str) -> Path:
    """Train, save after iteration 7 with a refresh in flight, lose every rank in iteration 8."""
    directory = lab.output(f"killed-{layout}-{'-'.join(flags)}")
    run = lab.run(layout, [*SNIP, *saving(directory), *flags], {"TINY_KILL_AFTER": "7"})
    assert all(status != 0 for status in run.statuses), run.report
    tracker = directory / "latest_checkpointed_iteration.txt"
    assert tracker.exists() and tracker.read_text().strip() == "7", run.report
    return directory


def resumed(lab: Lab, layout: str, load: Path, *flags: str) -> Run:
    return lab.run(layout, [*SNIP, "--load", str(load), *flags])


def recipes_of(run_output: Path, iteration: int) -> dict[str, str]:
    """Recipe of each linear under the plan of an iteration, as the run recorded it."""
    file = run_output / "precision" / f"{iteration}.json"
    return {row["name"]: row["recipe"] for row in json.loads(file.read_text())["linears"]}


def runnable(problem: dict[str, Any]) -> list[tuple[str, int, float, list[str]]]:
    """What each linear of a problem can run: name, stage, FLOPs, options."""
    return [
        (row["name"], row["stage"], row["flops"], sorted(row["options"]))
        for row in problem["linears"]
    ]


def numbers(value: Any, place: str) -> Iterator[tuple[str, float]]:
    """Yield every number of a JSON value, with its place."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from numbers(item, f"{place}.{key}")
    elif isinstance(value, int | float):
        yield place, float(value)
