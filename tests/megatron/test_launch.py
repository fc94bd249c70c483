"""The ways into a script: torchrun's `-m megatron_snip`, and `import megatron_snip.auto`."""

import json

from tests.distributed.launch import RANK_ENVIRONMENT, free_port
from tests.megatron.lab import LAYOUTS, MODEL, SCRIPT, SNIP, Lab, weights
from tests.processes import run_python


def test_torchrun_runs_what_the_other_tests_run(lab: Lab) -> None:
    """Fresh interpreters, from a directory that is neither the script's nor the package's."""
    folder = lab.output("torchrun")
    folder.mkdir()
    ranks, parallel = LAYOUTS["tp2"]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    launcher += ["--master-port", str(free_port())]
    words = ["-m", "megatron_snip", "--cpu", SCRIPT, *MODEL.split(), *parallel, *SNIP]
    environment = {**RANK_ENVIRONMENT, "TINY_RESULTS": str(folder)}
    done = run_python(*launcher, *words, cwd=folder, timeout=280, **environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = [json.loads((folder / f"{rank}.json").read_text())["weights"] for rank in range(ranks)]
    assert found == weights(lab.planned("tp2"))
    assert (folder / "snip" / "plans" / "7.json").is_file()  # no --save: the current directory


def test_one_import_does_the_same(lab: Lab) -> None:
    run = lab.run("tp2", SNIP, {"TINY_AUTO": "1"}, plain=True)
    assert weights(run) == weights(lab.planned("tp2"))


def test_one_import_without_the_flag_changes_nothing(lab: Lab) -> None:
    run = lab.run("tp2", (), {"TINY_AUTO": "1"}, plain=True)
    assert weights(run) == weights(lab.run("tp2", plain=True))
    assert "megatron_snip" not in run.logs[0]
