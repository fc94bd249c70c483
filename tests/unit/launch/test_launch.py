"""Scripts of launch/: what they print, run and install, and when a job requeues.

A cluster's commands are stand-ins here; tests/slurm/ runs the same files on a real cluster.
"""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

from megatron_snip.cli.script import expand

LAUNCH = Path(__file__).parents[3] / "launch"
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"


SCONTROL = """
case $1 in
  show) printf 'n1\\nn2\\n' ;;
  requeue) echo "requeued $2" ;;
esac
"""


def run_script(
    folder: Path, name: str, *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `bash launch/NAME WORDS` in `folder`, where `folder/bin` comes first on PATH."""
    variables = {"PATH": f"{folder / 'bin'}:{SYSTEM_PATH}", **environment}
    command = ["bash", str(LAUNCH / name), *words]
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=600
    )


def dry_run(folder: Path, name: str, *words: str, **environment: str) -> list[list[str]]:
    """Return the commands that a dry run prints, as a shell would read them."""
    stand_in(folder, "scontrol", SCONTROL)
    done = run_script(folder, name, "--dry-run", *words, **environment)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    return [shlex.split(line) for line in lines]


def stand_in(folder: Path, name: str, body: str) -> None:
    """Put a script called `name` on the PATH of `run_script`."""
    (folder / "bin").mkdir(exist_ok=True)
    file = folder / "bin" / name
    file.write_text(f"#!/bin/bash\n{body}\n")
    file.chmod(0o755)


TWO_NODES = {
    "SNIP_NODES": "2",
    "SNIP_NODE_RANK": "1",
    "SNIP_RANKS_PER_NODE": "4",
    "MASTER_ADDR": "host a",
    "MASTER_PORT": "1234",
}


def test_one_node_needs_no_address(tmp_path: Path) -> None:
    words = ["train", "--config", "a file.yaml", "--snip-pin", "decoder.*=fp8"]
    (command,) = dry_run(
        tmp_path, "torchrun.sh", *words, SNIP_RANKS_PER_NODE="2", SNIP_PYTHON="/a python"
    )
    assert command[:3] == ["/a python", "-m", "torch.distributed.run"]
    read = parse_args(command[3:])
    assert (read.nproc_per_node, read.standalone, read.nnodes) == ("2", True, "1:1")
    assert (read.module, read.training_script) == (True, "megatron_snip")
    assert read.training_script_args == words


def test_several_nodes_meet_at_the_first_in_their_order(tmp_path: Path) -> None:
    (command,) = dry_run(tmp_path, "torchrun.sh", "pretrain_gpt.py", "--snip", **TWO_NODES)
    read = parse_args(command[3:])
    assert (read.rdzv_backend, read.standalone) == ("static", False)
    assert (read.nnodes, read.node_rank, read.nproc_per_node) == ("2", 1, "4")
    assert (read.master_addr, read.master_port) == ("host a", 1234)
    assert read.training_script_args == ["pretrain_gpt.py", "--snip"]


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_several_nodes_without_an_address_are_refused(tmp_path: Path, missing: str) -> None:
    environment = {name: value for name, value in TWO_NODES.items() if name != missing}
    done = run_script(tmp_path, "torchrun.sh", "train", **environment)
    assert done.returncode != 0
    assert missing in done.stderr


def test_both_programs_save_and_go_on_in_one_folder(tmp_path: Path) -> None:
    folder = {"SNIP_CHECKPOINTS": "/c"}
    both = ["--save", "/c", "--load", "/c"]
    (train,) = dry_run(tmp_path, "torchrun.sh", "train", **folder)
    assert train[-5:] == ["train", *both]
    words = ["--cpu", "dir/pretrain_gpt.py", "--snip"]
    (script,) = dry_run(tmp_path, "torchrun.sh", *words, **folder)
    signals = ["--exit-signal-handler", "--exit-signal", "SIGUSR1"]
    begin = script.index("--cpu")
    assert script[begin:] == [*words, *both, *signals]


def refusal(folder: Path, *words: str) -> str:
    """Return the line with which a job with SNIP_CHECKPOINTS refuses `words`."""
    done = run_script(folder, "torchrun.sh", *words, SNIP_CHECKPOINTS="/c")
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


@pytest.mark.parametrize("flag", ["--save", "--save=/d", "--load", "--load=/d"])
def test_another_folder_is_refused(tmp_path: Path, flag: str) -> None:
    line = f"torchrun.sh: checkpoints are in SNIP_CHECKPOINTS (/c); drop {flag}\n"
    assert refusal(tmp_path, "train", flag, "/d") == line


@pytest.mark.parametrize(
    "text",
    [
        "--load /d",
        "--lr 1 # a comment's quote\n  --load=/d",
        "--wandb-exp-name 'run #3' --load /d",
        '"--load" "/d"',
    ],
)
def test_another_folder_in_an_argument_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a b.args").write_text(text)
    (flag,) = [word for word in expand([f"@{tmp_path}/a b.args"]) if word.startswith("--load")]
    line = f"torchrun.sh: checkpoints are in SNIP_CHECKPOINTS (/c); drop {flag} in a b.args\n"
    assert refusal(tmp_path, "pretrain_gpt.py", "--snip", "@a b.args") == line


def test_an_argument_file_without_folders_is_accepted(tmp_path: Path) -> None:
    text = "# without --save /d\n--save-interval 5 # not --load\n--wandb-exp-name 'a --save'\n"
    (tmp_path / "job.args").write_text(text)
    words = ["pretrain_gpt.py", "@job.args", "@missing.args", "@"]
    (command,) = dry_run(tmp_path, "torchrun.sh", *words, SNIP_CHECKPOINTS="/c")
    begin = command.index("pretrain_gpt.py")
    assert command[begin : begin + 4] == words


def test_a_script_of_megatron_bridge_is_refused_where_it_would_get_flags(tmp_path: Path) -> None:
    script = tmp_path / "run_recipe.py"
    script.write_text("import os\n\nfrom megatron.bridge.recipes import utils\n")
    words = ["--cpu", "run_recipe.py", "--recipe", "x", "--snip"]
    line = "torchrun.sh: 'run_recipe.py' is a script of Megatron-Bridge, which has no --save; "
    assert refusal(tmp_path, *words) == line + "start it as in docs/megatron-bridge.md\n"
    (command,) = dry_run(tmp_path, "torchrun.sh", *words)  # without SNIP_CHECKPOINTS
    assert command[-len(words) :] == words
    script.write_text("import megatron.bridge\nfrom megatron.training import pretrain\n")
    (command,) = dry_run(tmp_path, "torchrun.sh", *words, SNIP_CHECKPOINTS="/c")
    assert command[-1] == "SIGUSR1"


@pytest.mark.parametrize("words", [[], ["--dry-run"], ["--cpu"], ["plan"], ["--snip"]])
def test_other_words_show_the_usage(tmp_path: Path, words: list[str]) -> None:
    done = run_script(tmp_path, "torchrun.sh", *words)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: torchrun.sh")


RANK = """
import os, signal, subprocess, sys, time

def save(*_):
    time.sleep(0.2)  # a signal to the child as well would have ended it by now
    print("rank: saved, its child is", "gone" if child.poll() is not None else "alive")
    child.kill()
    os._exit(0)

os.kill(os.getpid(), signal.SIGUSR1)  # still starting: without a handler it must not die
signal.signal(signal.SIGUSR1, save)
child = subprocess.Popen(["sleep", "60"])  # its handler would be the default
exec(os.environ["ASK"])
time.sleep(20)
sys.exit("nobody has sent the signal")
"""


@pytest.mark.parametrize(
    ("ask", "checkpoints"),
    [("os.kill(int(os.environ['STARTER']), signal.SIGUSR1)", ""), ("open('c/.stop', 'w')", "c")],
    ids=["signal", "file"],
)
def test_a_wish_to_stop_reaches_the_ranks_alone(tmp_path: Path, ask: str, checkpoints: str) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "rank.py").write_text(RANK)
    # torchrun's parent is the script.
    torchrun = f"export STARTER=$PPID; {sys.executable} -u rank.py; echo torchrun: status $?"
    stand_in(tmp_path, "python3", torchrun)
    environment = {"SNIP_CHECKPOINTS": checkpoints, "ASK": ask}
    done = run_script(tmp_path, "torchrun.sh", "train", **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank: saved, its child is alive\ntorchrun: status 0\n"


def test_a_wish_to_stop_holds_for_one_run(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".stop").touch()
    stand_in(tmp_path, "python3", "ls -A c")
    # An interactive shell on a node of a Slurm allocation is a step as well.
    environment = {"SNIP_CHECKPOINTS": "c", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "4294967290"}
    assert run_script(tmp_path, "torchrun.sh", "train", **environment).stdout == ""


def test_a_node_that_starts_late_leaves_the_file_that_stops_the_job(tmp_path: Path) -> None:
    stand_in(tmp_path, "python3", "ls -A c")
    step = 'until [ -e c/.stop ]; do sleep 0.05; done; while [ "$1" != bash ]; do shift; done; "$@"'
    done = run_job(tmp_path, WARN + step)
    assert done.returncode == 0, done.stderr
    assert ".stop" in done.stdout.splitlines()


def test_there_is_a_rank_for_each_gpu_that_the_job_may_use(tmp_path: Path) -> None:
    def num_ranks(**environment: str) -> str:
        ((*command,),) = dry_run(tmp_path, "torchrun.sh", "train", **environment)
        return command[command.index("--nproc-per-node") + 1]

    stand_in(tmp_path, "nvidia-smi", "for i in 0 1 2 3; do echo GPU $i: NVIDIA; done")
    assert num_ranks() == "4"
    assert num_ranks(CUDA_VISIBLE_DEVICES="2,3") == "2"
    assert num_ranks(CUDA_VISIBLE_DEVICES="") == "1"  # GPUs are hidden
    assert num_ranks(CUDA_VISIBLE_DEVICES="2,3", SNIP_RANKS_PER_NODE="1") == "1"
    assert num_ranks(SLURM_GPUS_ON_NODE="3") == "3"


def test_a_node_without_a_driver_starts_no_rank(tmp_path: Path) -> None:
    """One rank would be too few for its peers on other nodes."""
    stand_in(tmp_path, "nvidia-smi", "echo NVIDIA-SMI has failed; echo; exit 9")
    done = run_script(tmp_path, "torchrun.sh", "--dry-run", "train")
    assert done.returncode == 2
    assert "finds no GPU: NVIDIA-SMI has failed; to start ranks without one" in done.stderr
    assert run_script(tmp_path, "torchrun.sh", "--dry-run", "train", SNIP_RANKS_PER_NODE="2").stdout


@pytest.mark.parametrize(
    ("flag", "connections"),
    [
        ("--bf16", "1"),
        ("--use-megatron-fsdp", "unset"),
        ("--use-torch-fsdp2", "unset"),
        ("@a", "unset"),
        ("@quoted", "unset"),
        ("@open quote", "1"),
    ],
)
def test_fsdp_may_have_more_than_one_queue(tmp_path: Path, flag: str, connections: str) -> None:
    """Megatron refuses FSDP with `CUDA_DEVICE_MAX_CONNECTIONS=1`."""
    (tmp_path / "pretrain.py").touch()
    (tmp_path / "a").write_text("--bf16\n--use-megatron-fsdp # a comment\n")
    (tmp_path / "quoted").write_text("--wandb-exp-name 'run #3' --use-megatron-fsdp\n")
    (tmp_path / "open quote").write_text("--wandb-exp-name 'run\n")  # the ranks refuse it
    stand_in(tmp_path, "python3", 'echo "${CUDA_DEVICE_MAX_CONNECTIONS:-unset}"')
    done = run_script(tmp_path, "torchrun.sh", "pretrain.py", flag, "--snip")
    assert done.stdout == f"{connections}\n", done.stderr


def test_other_signals_end_torchrun(tmp_path: Path) -> None:
    stand_in(tmp_path, "python3", 'kill -TERM "$PPID"; while :; do sleep 0.05; done')
    done = run_script(tmp_path, "torchrun.sh", "train")
    assert done.returncode == 128 + 15


JOB = {
    "SLURM_JOB_ID": "10042",
    "SLURM_JOB_NAME": "mine",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_NODELIST": "n[1-4]",
}


def test_a_dry_run_shows_the_step_and_what_a_node_runs(tmp_path: Path) -> None:
    words = ("train", "--config", "a b.yaml")
    variables, step, node = dry_run(tmp_path, "slurm.sbatch", *words, **JOB)
    # Else `sbatch --export=NONE` holds for the step as well, and each node would train alone.
    assert step[:3] == ["srun", "--export=ALL", "--kill-on-bad-exit=1"]
    assert "--ntasks-per-node=1" in step
    begin = step.index("bash")
    assert step[begin:] == ["bash", str(LAUNCH / "torchrun.sh"), "train", "--config", "a b.yaml"]
    read = parse_args(node[3:])
    assert (read.nnodes, read.node_rank) == ("4", 0)
    assert (read.master_addr, read.master_port) == ("n1", 20042)
    checkpoints = str(tmp_path / "runs" / "mine-10042" / "checkpoints")
    assert node[-4:] == ["--save", checkpoints, "--load", checkpoints]
    folder = f"SNIP_CHECKPOINTS={checkpoints}"
    assert variables == ["export", "SNIP_NODES=4", folder, "MASTER_ADDR=n1", "MASTER_PORT=20042"]


def test_a_dry_run_off_the_cluster_says_that_its_commands_are_a_jobs(tmp_path: Path) -> None:
    done = run_script(tmp_path, "slurm.sbatch", "--dry-run", "train")
    first, second = done.stdout.splitlines()[:2]
    assert first.startswith("# This is no Slurm job")
    assert f"sbatch --nodes 2 {LAUNCH / 'slurm.sbatch'}" in second


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_RESTART_COUNT"])
def test_a_variable_that_is_no_number_is_never_evaluated(tmp_path: Path, name: str) -> None:
    value = f"a[$(touch {tmp_path / 'ran'})]"
    stand_in(tmp_path, "scontrol", SCONTROL)
    done = run_script(tmp_path, "slurm.sbatch", "--dry-run", "train", **{**JOB, name: value})
    assert done.returncode == 2 and f"{name} must be a number" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_a_job_id_may_begin_with_zero(tmp_path: Path) -> None:
    job = {**JOB, "SLURM_JOB_ID": "08"}
    *_, node = dry_run(tmp_path, "slurm.sbatch", "train", **job)
    assert parse_args(node[3:]).master_port == 20008


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_is_printed_and_is_no_error(tmp_path: Path, flag: str) -> None:
    for name, text in (("torchrun.sh", "usage: torchrun.sh"), ("slurm.sbatch", "sbatch launch/")):
        done = run_script(tmp_path, name, flag)
        assert done.returncode == 0 and text in done.stdout and done.stderr == ""


def test_containers_are_one_variable(tmp_path: Path) -> None:
    (_, plain, _) = dry_run(tmp_path, "slurm.sbatch", "train", **JOB)
    assert not any("container" in word or word == "apptainer" for word in plain)
    (_, pyxis, _) = dry_run(
        tmp_path,
        "slurm.sbatch",
        "train",
        **JOB,
        SNIP_CONTAINER="image:1",
        SNIP_CONTAINER_MOUNTS="/data:/data",
    )
    assert "--container-image=image:1" in pyxis
    mounts = f"{tmp_path}:{tmp_path},{LAUNCH}:{LAUNCH},/data:/data"
    assert f"--container-mounts={mounts}" in pyxis
    assert f"--container-workdir={tmp_path}" in pyxis
    (_, file, _) = dry_run(tmp_path, "slurm.sbatch", "train", **JOB, SNIP_CONTAINER="image.sif")
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
    return run_script(folder, str(script), "train", **variables)


SAVE = "echo 40 > c/latest_checkpointed_iteration.txt; exit 0"
WARN = "kill -USR1 $PPID; "
"""Slurm's warning to the batch script, from inside the step."""


def until_asked(action: str) -> str:
    return f"{WARN} until [ -e c/.stop ]; do sleep 0.05; done; {action}"


@pytest.mark.parametrize(
    ("srun", "saved", "status", "last_line"),
    [
        (until_asked(SAVE), "", 0, "requeued 10042"),
        (until_asked(SAVE), "40", 0, "done, no iteration was left"),
        (until_asked(SAVE.replace("exit 0", "exit 9")), "", 9, "status 9"),
        ("exit 9", "", 9, "status 9"),
    ],
)
def test_near_its_time_limit_a_job_with_iterations_left_saves_and_is_queued_again(
    tmp_path: Path, srun: str, saved: str, status: int, last_line: str
) -> None:
    (tmp_path / "c").mkdir()
    if saved:
        (tmp_path / "c" / "latest_checkpointed_iteration.txt").write_text(saved)
    done = run_job(tmp_path, srun)
    assert done.returncode == status, done.stderr
    assert last_line in (done.stderr if status else done.stdout).splitlines()[-1]
    assert ("the time limit is near" in done.stdout) == (srun != "exit 9")
    assert ("requeued" in done.stdout) == last_line.startswith("requeued")


def test_slurms_copy_of_the_script_finds_the_others(tmp_path: Path) -> None:
    copy = tmp_path / "slurm_script"
    copy.write_text((LAUNCH / "slurm.sbatch").read_text())
    show = f'[ "$2" = hostnames ] || echo "   Command={LAUNCH}/slurm.sbatch train";'
    done = run_job(tmp_path, 'echo "step: $*"', script=copy, SHOW=show)
    assert done.returncode == 0, done.stderr
    assert f"bash {LAUNCH}/torchrun.sh train" in done.stdout


def test_a_copy_that_does_not_find_the_others_names_the_variable(tmp_path: Path) -> None:
    copy = tmp_path / "slurm_script"
    copy.write_text((LAUNCH / "slurm.sbatch").read_text())
    show = '[ "$2" = hostnames ] || echo "   Command=/a b/launch/slurm.sbatch train";'
    done = run_job(tmp_path, 'echo "step: $*"', script=copy, SHOW=show)
    assert done.returncode == 2
    assert "set SNIP_LAUNCH" in done.stderr
    found = run_job(tmp_path, 'echo "step: $*"', script=copy, SHOW=show, SNIP_LAUNCH=str(LAUNCH))
    assert f"bash {LAUNCH}/torchrun.sh train" in found.stdout


CONTAINERS_PYTHON = """
case $1,$2 in
  -m,venv)
    mkdir -p "${@: -1}/bin"
    cp "$0" "${@: -1}/bin/python"
    printf '#!/bin/sh\\n' >"${@: -1}/bin/megatron-snip"
    chmod 755 "${@: -1}/bin/megatron-snip"
    ;;
  -m,pip) if [ "${@: -2:1}" = -r ]; then cp "${@: -1}" installed.txt; fi ;;
  *) exec "$REAL_PYTHON" "$@" ;;
esac
"""


def run_in_container(folder: Path, **versions: str) -> subprocess.CompletedProcess[str]:
    """Run container_venv.sh where Python has packages of these versions; pip is a stand-in."""
    for name, version in versions.items():
        info = folder / "packages" / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    stand_in(folder, "python3", CONTAINERS_PYTHON)
    # Without -S and -I the packages of this test's own Python would be found, too.
    stand_in(folder, "bare", f'PYTHONPATH={folder}/packages exec {sys.executable} -S "$@"')
    return run_script(folder, "container_venv.sh", "venv", REAL_PYTHON=str(folder / "bin" / "bare"))


def test_a_containers_torch_and_megatron_stay(tmp_path: Path) -> None:
    versions = {"torch": "2.9.0a0", "transformer_engine": "2.9.0+abc"}
    done = run_in_container(tmp_path, **versions)
    assert done.returncode == 0, done.stderr
    assert "torch 2.9.0a0, Transformer Engine 2.9.0+abc, megatron-core (none)" in done.stdout
    complete = (LAUNCH.parent / "requirements" / "gpu.txt").read_text()
    assert (tmp_path / "installed.txt").read_text() == complete
    assert f"{tmp_path}/venv/bin/python" in (tmp_path / "venv" / "bin" / "torchrun").read_text()
    done = run_in_container(tmp_path, megatron_core="0.18.0")
    assert done.returncode == 0, done.stderr
    installed = (tmp_path / "installed.txt").read_text()
    left_out = [line for line in complete.splitlines() if line not in installed.splitlines()]
    assert left_out[0].startswith("megatron-core==")
    assert all(line.startswith("    --hash") for line in left_out[1:])


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({}, "has no torch"),
        ({"torch": "2.6.0", "transformer_engine": "2.7.1"}, "2.8 is the oldest"),
    ],
)
def test_another_container_is_refused_in_one_line(
    tmp_path: Path, versions: dict[str, str], expected: str
) -> None:
    done = run_in_container(tmp_path, **versions)
    assert done.returncode == 2 and expected in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "venv").exists()
