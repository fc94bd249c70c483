"""launch/slurm.sbatch: what it prints, and when it queues its job again.

Slurm's commands are stand-ins here; tests/slurm/ runs the same file on a real cluster.
"""

import subprocess
from pathlib import Path

import pytest

from tests.unit.launch.shell import LAUNCH, commands, flag, run_script, stand_in

JOB = {
    "SLURM_JOB_ID": "10042",
    "SLURM_JOB_NAME": "mine",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_NODELIST": "n[1-4]",
}
SCONTROL = """
case $1 in
  show) printf 'n1\\nn2\\n' ;;
  requeue) echo "requeued $2" ;;
esac
"""


def dry_run(folder: Path, *words: str, **environment: str) -> list[list[str]]:
    stand_in(folder, "scontrol", SCONTROL)
    done = run_script("slurm.sbatch", "--dry-run", *words, folder=folder, environment=environment)
    return commands(done)


def test_a_dry_run_shows_the_step_and_what_a_node_runs(tmp_path: Path) -> None:
    step, node = dry_run(tmp_path, "train", "--config", "a b.yaml", **JOB)
    assert step[:2] == ["srun", "--kill-on-bad-exit=1"]
    assert "--ntasks-per-node=1" in step
    begin = step.index("bash")
    assert step[begin:] == ["bash", str(LAUNCH / "torchrun.sh"), "train", "--config", "a b.yaml"]
    assert (flag(node, "--nnodes"), flag(node, "--node-rank")) == ("4", "0")
    assert (flag(node, "--master-addr"), flag(node, "--master-port")) == ("n1", "20042")
    checkpoints = str(tmp_path / "runs" / "mine-10042" / "checkpoints")
    assert node[-4:] == ["--save", checkpoints, "--load", checkpoints]


def test_containers_are_one_variable(tmp_path: Path) -> None:
    (plain, _) = dry_run(tmp_path, "train", **JOB)
    assert not any("container" in word or word == "apptainer" for word in plain)
    (pyxis, _) = dry_run(
        tmp_path, "train", **JOB, SNIP_CONTAINER="image:1", SNIP_CONTAINER_MOUNTS="/data:/data"
    )
    assert "--container-image=image:1" in pyxis
    mounts = f"{tmp_path}:{tmp_path},{LAUNCH}:{LAUNCH},/data:/data"
    assert f"--container-mounts={mounts}" in pyxis
    assert f"--container-workdir={tmp_path}" in pyxis
    (file, _) = dry_run(tmp_path, "train", **JOB, SNIP_CONTAINER="image.sif")
    begin = file.index("apptainer")
    assert file[begin : begin + 3] == ["apptainer", "exec", "--nv"]
    assert file.index("image.sif") + 1 == file.index("bash")


def run_job(
    folder: Path, srun: str, script: Path = LAUNCH / "slurm.sbatch", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the batch script with an `srun` of our own."""
    stand_in(folder, "scontrol", SCONTROL.replace("show)", f"show) {environment.get('SHOW', '')}"))
    stand_in(folder, "srun", srun)
    checkpoints = folder / "c"
    checkpoints.mkdir(exist_ok=True)
    variables = {**JOB, "SNIP_CHECKPOINTS": str(checkpoints), **environment}
    return run_script(str(script), "train", folder=folder, environment=variables)


SAVE = "echo 40 > c/latest_checkpointed_iteration.txt; exit 0"
WARN = "kill -USR1 $PPID; "
"""Slurm's warning to the batch script, from inside the step."""


def until_asked(action: str) -> str:
    return f"{WARN} until [ -e c/.stop ]; do sleep 0.05; done; {action}"


def test_near_its_time_limit_it_saves_and_is_queued_again(tmp_path: Path) -> None:
    done = run_job(tmp_path, until_asked(SAVE))
    assert done.returncode == 0, done.stderr
    assert "the time limit is near" in done.stdout
    assert done.stdout.rstrip().endswith("requeued 10042")


def test_who_has_no_step_left_is_not_queued_again(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "latest_checkpointed_iteration.txt").write_text("40\n")
    done = run_job(tmp_path, until_asked(SAVE))
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("done, no iteration was left")


@pytest.mark.parametrize("srun", ["exit 9", until_asked(SAVE.replace("exit 0", "exit 9"))])
def test_a_failed_step_fails_the_job(tmp_path: Path, srun: str) -> None:
    done = run_job(tmp_path, srun)
    assert done.returncode == 9
    assert "status 9" in done.stderr
    assert "requeued" not in done.stdout


def test_slurms_copy_of_the_script_finds_the_others(tmp_path: Path) -> None:
    copy = tmp_path / "slurm_script"
    copy.write_text((LAUNCH / "slurm.sbatch").read_text())
    show = f'[ "$2" = hostnames ] || echo "   Command={LAUNCH}/slurm.sbatch train";'
    done = run_job(tmp_path, 'echo "step: $*"', script=copy, SHOW=show)
    assert done.returncode == 0, done.stderr
    assert f"bash {LAUNCH}/torchrun.sh train" in done.stdout
