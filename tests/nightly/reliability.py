"""What happens to a job under faults; writes the table of docs/reliability.md.

    python -m tests.nightly.reliability [--only WORD] [--write]

Each case starts a job of two ranks on this machine, Megatron's own `pretrain` under
`python -m megatron_snip` (in .venv-megatron), and injects a fault. It records the exit status, the
seconds until the job ended, processes that are left, and the last line that the job printed. Then
the same command loads the checkpoint that was left and trains on. Exit status 1 if a process is
left or a job did not end. Full disks are small file systems in memory and a read-only installation
is a mount, which only root may make.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.distributed.damage import flip_a_bit, truncate
from tests.distributed.launch import RANK_ENVIRONMENT, ROOT, free_port
from tests.megatron.lab import MODEL

PAGE = ROOT / "docs" / "reliability.md"
PATIENCE_S = 1500.0
SNIP = "--snip-interval 4 --snip-start-step 11 --snip-lag 2 --snip-efficiency-target 0.5"
PRETRAIN = f"""{MODEL} --num-layers 2 --train-iters 400 --eval-interval 1000 --eval-iters 0
    --tensor-model-parallel-size 2 --snip --snip-formats fp8,fp4 {SNIP}"""


class Job:
    """A running job of two ranks, with a folder of its own and its output in a file there."""

    def __init__(
        self, folder: Path, more: str = "", prefix: str = "", of_last_rank: str = ""
    ) -> None:
        """Start it: `more` are flags, `of_last_rank` those of one rank, `prefix` is shell text."""
        self.folder, self.log = folder, folder / "log"
        python = ROOT / ".venv-megatron" / "bin" / "python"
        words = f"{python} -W ignore -m torch.distributed.run --nproc-per-node 2"
        words += f" --master-port {free_port()} --no-python sh tests/nightly/rank.sh {python}"
        words += " -W ignore -m megatron_snip --cpu"
        words += f" tests/megatron/pretrain_tiny.py {PRETRAIN} --snip-output-dir {folder}/run"
        words += f" --save {folder}/save --save-interval 8"
        (folder / "save").mkdir(exist_ok=True)
        environment = {**os.environ, **RANK_ENVIRONMENT}
        environment |= {"PYTHONPATH": str(ROOT), "TINY_RESULTS": str(folder)}
        environment["OF_LAST_RANK"] = of_last_rank
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
        self.signalled_at: float | None = None  # last; time.monotonic()
        self.ended_at: float | None = None

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def last_logged(self) -> int:
        """Return the last iteration in its log; 0 for none."""
        return max((int(n) for n in re.findall(r"iteration +(\d+)", self.text)), default=0)

    def wait_for_iteration(self, number: int) -> None:
        """Wait until an iteration is in metrics.jsonl, or the job has ended."""
        metrics, end = self.folder / "run" / "metrics.jsonl", time.monotonic() + PATIENCE_S
        while time.monotonic() < end and self._process.poll() is None:
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= number:
                return
            if self.last_logged() >= number:  # where no metrics can be written
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
                alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
                # Megatron's checkpoint writer outlives killed ranks, also without SNIP.
                if alive and "multiprocessing" not in " ".join(process.cmdline()):
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

    def signal(self, number: int) -> None:
        self.signalled_at = time.monotonic()
        self._process.send_signal(number)

    def wait(self) -> int | None:
        """Wait for the end; return the exit status, or None if it does not come."""
        status: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(PATIENCE_S)
        self.ended_at = self.ended_at or time.monotonic()
        return status

    def end(self) -> tuple[int | None, int]:
        """Wait for the end; return (exit status or None, processes left), and clean up."""
        status = self.wait()
        until = time.monotonic() + 15
        while (left := self.processes()) and time.monotonic() < until:
            time.sleep(0.5)
        for process in left:
            process.kill()
        return status, len(left)


Fault = Callable[[Job], str | None]
"""May return a message that is shown in place of the job's last one."""


@dataclass(frozen=True)
class Case:
    name: str  # what was done, for the table
    fault: Fault
    at: int = 14  # after this iteration
    prefix: str = ""  # shell text before the command
    more: str = ""  # flags
    of_last_rank: str = ""  # flags of one rank
    needs_root: bool = False
    small: tuple[str, ...] = ()  # folders of the job that share a small file system
    damage: Callable[[Path], object] | None = None  # of the checkpoint, before it is loaded
    goes_on: bool = False  # the job must train on; SIGTERM ends it at iteration 24


def _terminate_in_save(job: Job) -> None:
    """Send SIGTERM while the folder of the checkpoint of iteration 16 is there and not named."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and not any((job.folder / "save").glob("*iter_0000016*")):
        time.sleep(0.002)
    job.signal(signal.SIGTERM)


def _terminate_on_a_busy_machine(job: Job) -> None:
    """Send SIGTERM while two other processes want each core."""
    count = 2 * (os.cpu_count() or 1)
    words = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(words, start_new_session=True) for _ in range(count)]
    try:
        time.sleep(1)
        job.signal(signal.SIGTERM)
        job.wait()
    finally:
        for process in others:
            process.kill()
            process.wait()


def _kill_rank(job: Job) -> None:
    job.ranks()[1].kill()


def _kill_first_rank(job: Job) -> None:
    job.ranks()[0].kill()


def _stop_rank_and_interrupt(job: Job) -> None:
    _stop_rank(job)
    time.sleep(1)
    job.signal(signal.SIGINT)


def _stop_rank(job: Job) -> None:
    job.ranks()[1].suspend()
    job.signalled_at = time.monotonic()


def _start_another(job: Job) -> str:
    """Start another run in the same directory; return how it ends."""
    folder = job.folder / "other"
    folder.mkdir()
    other = Job(folder, f"--snip-output-dir {job.folder}/run")
    status, _ = other.end()
    return f"the other job: exit {status}: {_last_line(other.text)}"


def _kill_solver(job: Job) -> None:
    for process in job.processes():
        if "solver_process" in " ".join(process.cmdline()):
            process.kill()


def _sending(number: int) -> Fault:
    def send(job: Job) -> None:
        job.signal(number)

    return send


_terminate, _interrupt = _sending(signal.SIGTERM), _sending(signal.SIGINT)


def _stop_rank_and_interrupt_twice(job: Job) -> None:
    _stop_rank_and_interrupt(job)
    time.sleep(1)
    job.signal(signal.SIGINT)


def _block_folders(job: Job) -> None:
    for name in ("plans", "problems", "divergences", "precision"):
        folder = job.folder / "run" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.write_text("not a folder")


def _fill(name: str) -> Fault:
    def fill(job: Job) -> None:
        with contextlib.suppress(OSError), (job.folder / name / "filler").open("wb") as file:
            while True:
                file.write(b"x" * 4096)
                file.flush()

    return fill


def _nothing(job: Job) -> None:
    pass


def _delete_run(job: Job) -> None:
    shutil.rmtree(job.folder / "run")


CASES = (
    Case("`kill -9` of a rank", _kill_rank),
    Case("`kill -9` of rank 0", _kill_first_rank),
    Case(
        "`kill -STOP` of a rank, `--distributed-timeout-minutes 1`",
        _stop_rank,
        more="--distributed-timeout-minutes 1",
    ),
    Case("`kill -STOP` of a rank, then Ctrl-C", _stop_rank_and_interrupt),
    Case("the same, Ctrl-C twice", _stop_rank_and_interrupt_twice),
    Case("SIGTERM in baseline steps", _terminate),
    Case("SIGTERM as an iteration is measured", _terminate, at=10),
    Case("SIGTERM at the first refresh on a busy machine", _terminate_on_a_busy_machine, at=10),
    Case("SIGTERM as the solver works", _terminate, at=11),
    Case("SIGTERM as a checkpoint is written", _terminate_in_save),
    Case("Ctrl-C", _interrupt),
    Case("SIGHUP", _sending(signal.SIGHUP)),
    Case("`kill -9` of the solver", _kill_solver, goes_on=True),
    Case(
        "the solver runs out of memory",
        _nothing,
        more="--snip-plugins tests.nightly.hungry --snip-policy hungry",
        goes_on=True,
    ),
    Case(
        "the solver's plan misses the target",
        _nothing,
        more="--snip-plugins tests.nightly.wrong --snip-policy wrong",
        goes_on=True,
    ),
    Case("another run starts in the directory", _start_another, goes_on=True),
    Case("`--no-snip` on one rank", _nothing, of_last_rank="--no-snip"),
    Case("another `--snip-interval` on one rank", _nothing, of_last_rank="--snip-interval 5"),
    Case("SNIP's folders cannot be written", _block_folders, goes_on=True),
    Case("SNIP's directory is deleted", _delete_run, goes_on=True),
    Case("disk full: SNIP's folder", _fill("run"), small=("run",), goes_on=True),
    Case("disk full: checkpoints", _fill("save"), small=("save",)),
    Case("disk full: SNIP's folder and checkpoints", _fill("save"), small=("run", "save")),
    Case("checkpoint: a bit flipped", _terminate, damage=flip_a_bit),
    Case("checkpoint: a file cut short", _terminate, damage=truncate),
    Case("checkpoint: bad entry `snip`", _terminate, prefix="export TINY_BAD_STATE=2;"),
    Case("`ulimit -n 64`", _nothing, prefix="ulimit -n 64;", goes_on=True),
    Case(
        "a read-only installation, no home, no rights",
        _nothing,
        prefix="exec unshare -m bash tests/nightly/read_only.sh",
        needs_root=True,
        goes_on=True,
    ),
    Case("TMPDIR does not exist", _nothing, prefix="export TMPDIR=/nonexistent;", goes_on=True),
)


def run(case: Case) -> tuple[str, ...]:
    with (
        tempfile.TemporaryDirectory(prefix="reliability-") as name,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(name)
        if case.needs_root and os.getuid() != 0:
            return (case.name, "not tried: only root may mount", "", "0", "", "")
        if case.small and not _share_small_disk(folder, case.small, stack):
            return (case.name, "not tried: only root may mount", "", "0", "", "")
        job = Job(folder, case.more, case.prefix, case.of_last_rank)
        job.wait_for_iteration(case.at)
        started = bool(job.ranks())
        found = None
        if started:
            found = case.fault(job)
            if case.goes_on:
                job.wait_for_iteration(24)
                job.signal(signal.SIGTERM)
        begin = job.signalled_at or time.monotonic()
        status, left = job.end()
        seconds = (job.ended_at or begin) - begin
        shown = _short(found) if found else _last_line(job.text)
        (folder / "save" / "filler").unlink(missing_ok=True)
        (folder / "run" / "filler").unlink(missing_ok=True)
        resumed, more_left = _resume(case, folder)
    ended = "did not end" if status is None else str(status)
    if not started:
        ended = f"did not start: {ended}"
    elif case.goes_on:
        ended = f"trained on; {ended}"
    row = (case.name, ended, f"{seconds:.0f}", str(left + more_left), shown, resumed)
    print(" | ".join(row), flush=True)
    return row


def _share_small_disk(folder: Path, names: tuple[str, ...], stack: contextlib.ExitStack) -> bool:
    """Put folders of a job on one file system of 64 MB; return False if that is not allowed."""
    disk = folder / "disk"
    disk.mkdir()
    mounts = [(["-t", "tmpfs", "-o", "size=64m", "tmpfs"], disk)]
    mounts += [(["--bind", str(disk / name)], folder / name) for name in names]
    for source, target in mounts:
        target.mkdir(exist_ok=True)
        if target != disk:
            (disk / target.name).mkdir()
        command = ["mount", *source, str(target)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return False
        stack.callback(subprocess.run, ["umount", "-l", str(target)], check=False)
    return True


def _resume(case: Case, folder: Path) -> tuple[str, int]:
    """Load what was saved; return what came of it, and how many processes were left."""
    saved = sorted(p.name for p in (folder / "save").glob("iter_*"))
    if not saved:
        return "no checkpoint", 0
    if case.damage is not None:
        case.damage(folder / "save" / saved[-1])
    shutil.rmtree(folder / "run" / "plans", ignore_errors=True)
    (folder / "second").mkdir()
    end = max(28, int(saved[-1].removeprefix("iter_")) + 4)
    job = Job(folder / "second", f"--load {folder}/save --exit-interval {end}")
    status, left = job.end()
    if status == 0 and job.last_logged() == end:
        notice = [line for line in job.text.splitlines() if "snip: " in line and "not" in line]
        latest = folder / "save" / "latest_checkpointed_iteration.txt"
        text = f"trains on from {latest.read_text().strip() if latest.exists() else 'the start'}"
        return (f"{text}; `{_short(notice[0])}`" if case.damage and notice else text), left
    return f"exit {status}: `{_last_line(job.text)}`", left


def _last_line(text: str) -> str:
    """Return the last line that says why, at most 160 characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("next:")]
    telling = [line for line in lines if re.search(r"Error|ended|stopped|signal|SIG", line)]
    ours = [line for line in lines if line.startswith("megatron-snip: ")]
    return _short((ours or telling or lines or [""])[-1])


def _short(line: str) -> str:
    line = re.sub(rf"{re.escape(tempfile.gettempdir())}/reliability-\w+/", "", line)
    return textwrap.shorten(line.replace("|", "/").replace("`", "'"), 160, placeholder=" ...")


def write_row(row: tuple[str, ...]) -> None:
    """Put a case's row into the page: in place of its last one, or at the end of the table."""
    title = "## What happened\n"
    before, _, section = PAGE.read_text().partition(title)
    table, end, after = section.partition("\n## ")
    lines = table.rstrip().split("\n")
    known = [i for i, line in enumerate(lines) if line.startswith(f"| {row[0]} |")]
    at = known[0] if known else len(lines)
    lines[at : at + 1] = ["| " + " | ".join((*row[:4], f"`{row[4]}`", row[5])) + " |"]
    PAGE.write_text(before + title + "\n".join(lines) + "\n" + end + after)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    args = parser.parse_args()
    bad = False
    for case in CASES:
        if args.only in case.name:
            row = run(case)
            bad |= "did not end" in row[1] or row[3] != "0"
            if args.write:
                write_row(row)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
