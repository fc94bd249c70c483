"""What happens to a job under faults; writes docs/reliability.md.

    python -m tests.nightly.reliability [--only WORD] [--write]

Each case starts a job of two ranks on this machine, under `megatron-snip train` or under Megatron's
own `pretrain` (`python -m megatron_snip`, in .venv-megatron), injects a fault and records the exit
status, the seconds until the job ended, processes that are left, and the last line that it printed.
Exit status 1 if a process is left or a job did not end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"
PATIENCE_S = 90.0
SNIP = "--snip-interval 4 --snip-start-step 11 --snip-lag 2 --snip-efficiency-target 0.5"
TRAIN = f"""train --config configs/demo.yaml --train-iters 400 --lr-warmup-iters 2 --eval-iters 0
    --num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --seq-length 64 --global-batch-size 4
    --micro-batch-size 2 --tensor-model-parallel-size 2 {SNIP}"""
PRETRAIN = f"""--num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8
    --train-iters 400 --lr 3e-3 --bf16 --tokenizer-type NullTokenizer --vocab-size 127
    --make-vocab-size-divisible-by 1 --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --log-interval 1
    --eval-interval 1000 --eval-iters 0 --num-workers 0 --tensor-model-parallel-size 2
    --snip --snip-formats fp8,fp4 {SNIP}"""


class Job:
    """A running job of two ranks, its output in a file.

    Attributes:
        folder: of this job alone.
        log: everything that it printed.
    """

    def __init__(self, kind: str, folder: Path, more: str = "", prefix: str = "") -> None:
        """Start it: `kind` is train or pretrain, `more` are flags, `prefix` is shell text."""
        self.folder, self.log = folder, folder / "log"
        if kind == "train":
            words = f"{sys.executable} -W ignore -m megatron_snip {TRAIN} --run-dir {folder}/run"
            words += f" --save {folder}/save --save-interval 8"
        else:
            python = ROOT / ".venv-megatron" / "bin" / "python"
            port = 20000 + os.getpid() % 20000
            words = f"{python} -W ignore -m torch.distributed.run --nproc-per-node 2"
            words += f" --master-port {port} -m megatron_snip --cpu tests/megatron/pretrain_tiny.py"
            words += f" {PRETRAIN} --save {folder}/save --save-interval 8"
            words += f" --snip-output-dir {folder}/run"
        (folder / "save").mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(ROOT),
            "TINY_RESULTS": str(folder),
        }
        command = f"{prefix} exec {' '.join(words.split())} {more}"
        self._process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=ROOT,
            env=environment,
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._seen: set[psutil.Process] = set()

    @property
    def text(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace")

    def wait_for_iteration(self, number: int) -> None:
        """Wait until an iteration is in metrics.jsonl, or the job has ended."""
        metrics, end = self.folder / "run" / "metrics.jsonl", time.monotonic() + PATIENCE_S
        while time.monotonic() < end and self._process.poll() is None:
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= number:
                return
            self.processes()
            time.sleep(0.2)

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the job that are alive, those that lost their parent included."""
        with contextlib.suppress(psutil.Error):
            job = psutil.Process(self._process.pid)
            self._seen |= {job, *job.children(recursive=True)}
        found = []
        for process in self._seen:
            with contextlib.suppress(psutil.Error):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        """Return the ranks' processes, rank 0 first; their children started later."""
        ranks: dict[int, psutil.Process] = {}
        for process in sorted(self.processes(), key=lambda p: p.create_time()):
            try:
                rank = process.environ().get("RANK")
                if rank is not None and "solver_process" not in " ".join(process.cmdline()):
                    ranks.setdefault(int(rank), process)
            except psutil.Error:
                continue
        return [ranks[rank] for rank in sorted(ranks)]

    def solver(self) -> list[psutil.Process]:
        """Return the solver's process."""
        return [p for p in self.processes() if "solver_process" in " ".join(p.cmdline())]

    def signal(self, number: int) -> None:
        """Send a signal to the command that the user started."""
        self._process.send_signal(number)

    def end(self) -> tuple[int | None, float, int]:
        """Wait for the end; return (exit status or None, seconds, processes left), and clean up."""
        begin = time.monotonic()
        status: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(PATIENCE_S)
        seconds = time.monotonic() - begin
        until = time.monotonic() + 15
        while (left := self.processes()) and time.monotonic() < until:
            time.sleep(0.5)
        for process in left:
            process.kill()
        return status, seconds, len(left)


Fault = Callable[[Job], None]


@dataclass(frozen=True)
class Case:
    """A fault.

    Attributes:
        name: what was done, for the table.
        kind: train or pretrain.
        fault: injects it, at iteration 14 of a running job.
        more: flags of the job.
        prefix: shell text before the command.
        goes_on: the job is expected to train on; it is ended by SIGTERM at iteration 24.
    """

    name: str
    kind: str
    fault: Fault
    more: str = ""
    prefix: str = ""
    goes_on: bool = False


def _kill_rank(job: Job) -> None:
    job.ranks()[1].kill()


def _stop_rank_and_interrupt(job: Job) -> None:
    job.ranks()[1].suspend()
    time.sleep(1)
    job.signal(signal.SIGINT)


def _kill_solver(job: Job) -> None:
    for process in job.solver():
        process.kill()


def _terminate(job: Job) -> None:
    job.signal(signal.SIGTERM)


def _interrupt(job: Job) -> None:
    job.signal(signal.SIGINT)


def _read_only(job: Job) -> None:
    """As a full disk: SNIP's directory takes no more bytes."""
    for name in ("plans", "problems", "divergences", "precision"):
        folder = job.folder / "run" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.write_text("not a folder")


def _nothing(job: Job) -> None:
    pass


def cases() -> Iterator[Case]:
    """Return all cases, each under both kinds of job."""
    missing = "export TMPDIR=/nonexistent;"
    for kind_cases in zip(
        *(_cases_of(kind, missing) for kind in ("train", "pretrain")), strict=True
    ):
        yield from kind_cases


def _cases_of(kind: str, missing: str) -> list[Case]:
    return [
        Case("`kill -9` of a rank", kind, _kill_rank),
        Case("`kill -STOP` of a rank, then Ctrl-C", kind, _stop_rank_and_interrupt),
        Case("SIGTERM", kind, _terminate),
        Case("`kill -9` of the solver", kind, _kill_solver, goes_on=True),
        Case("SNIP's directory cannot be written", kind, _read_only, goes_on=True),
        Case("Ctrl-C", kind, _interrupt),
        Case("`ulimit -n 64`", kind, _nothing, prefix="ulimit -n 64;", goes_on=True),
        Case("TMPDIR does not exist", kind, _nothing, prefix=missing, goes_on=True),
    ]


def run(case: Case) -> tuple[str, ...]:
    """Run a case; return its row."""
    with tempfile.TemporaryDirectory(prefix="reliability-") as name:
        job = Job(case.kind, Path(name), case.more, case.prefix)
        job.wait_for_iteration(14)
        started = "" if job.ranks() else "did not start; "
        if not started:
            case.fault(job)
            if case.goes_on:
                job.wait_for_iteration(24)
                job.signal(signal.SIGTERM)
        status, seconds, left = job.end()
        saved = sorted(p.name for p in (Path(name) / "save").glob("iter_*"))
        text = job.text
    shown = started + _last_line(text)
    ended = "did not end" if status is None else str(status)
    done = "trained on, ended by SIGTERM" if case.goes_on and not started else ""
    print(f"{case.kind:9} {case.name}: {ended}, {seconds:.0f} s, {left} left: {shown}")
    return (case.name, done, ended, f"{seconds:.0f}", str(left), saved[-1] if saved else "", shown)


def _last_line(text: str) -> str:
    """Return the last line that says why, at most 160 characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"snip|Error|ended|signal|SIG", line)]
    line = (telling or lines or [""])[-1]
    return line.replace("|", "/")[:160]


def page(rows: dict[str, list[tuple[str, ...]]]) -> str:
    """Return docs/reliability.md."""
    head = ("fault", "then", "exit status", "s until the end", "processes left", "last checkpoint")
    lines = [
        "# Reliability",
        "",
        "What was tried on jobs of two CPU ranks, and what happened. `python -m",
        "tests.nightly.reliability --write` (part of `make nightly`) writes this page. A fault is",
        "injected after iteration 14, with a plan applied and the next measurement close.",
        "",
    ]
    titles = {
        "train": "`megatron-snip train`",
        "pretrain": "Megatron's `pretrain` under `-m megatron_snip`",
    }
    for kind, found in rows.items():
        lines += [f"## {titles[kind]}", ""]
        lines += ["| " + " | ".join((*head, "last message")) + " |", "|" + "---|" * 7]
        lines += ["| " + " | ".join((*row[:-1], f"`{row[-1]}`")) + " |" for row in found]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Run the cases; return 1 if a process is left or a job did not end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose kind or name holds this text")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    args = parser.parse_args()
    rows: dict[str, list[tuple[str, ...]]] = {}
    for case in cases():
        if args.only in f"{case.kind} {case.name}":
            rows.setdefault(case.kind, []).append(run(case))
            if args.write:  # a page that is cut short still holds what was tried
                PAGE.write_text(page(rows))
    return int(any(row[2] == "did not end" or row[4] != "0" for r in rows.values() for row in r))


if __name__ == "__main__":
    sys.exit(main())
