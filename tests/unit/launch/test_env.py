"""launch/env.sh: what is set stays."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.unit.launch.shell import LAUNCH, SYSTEM_PATH, stand_in


def source(folder: Path, **environment: str) -> dict[str, str]:
    """Return the environment after env.sh."""
    script = 'set -euo pipefail; source "$1"; env -0'
    done = subprocess.run(
        ["bash", "-c", script, "_", str(LAUNCH / "env.sh")],
        env={"PATH": f"{folder / 'bin'}:{SYSTEM_PATH}", **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)


def test_what_is_set_stays(tmp_path: Path) -> None:
    given = {"OMP_NUM_THREADS": "6", "CUDA_DEVICE_MAX_CONNECTIONS": "32", "SNIP_PYTHON": "/p"}
    found = source(tmp_path, **given)
    assert {name: found[name] for name in given} == given
    assert source(tmp_path)["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_ranks_are_those_given_then_slurms_gpus_then_the_machines(tmp_path: Path) -> None:
    assert source(tmp_path)["SNIP_RANKS_PER_NODE"] == "1"
    stand_in(tmp_path, "nvidia-smi", "printf 'GPU 0\\nGPU 1\\nGPU 2\\n'")
    assert source(tmp_path)["SNIP_RANKS_PER_NODE"] == "3"
    assert source(tmp_path, SLURM_GPUS_ON_NODE="8")["SNIP_RANKS_PER_NODE"] == "8"
    given = source(tmp_path, SLURM_GPUS_ON_NODE="8", SNIP_RANKS_PER_NODE="4")
    assert given["SNIP_RANKS_PER_NODE"] == "4"


def test_an_interface_serves_both_transports(tmp_path: Path) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    assert not set(names) & set(source(tmp_path))
    found = source(tmp_path, SNIP_INTERFACE="ib0", NCCL_SOCKET_IFNAME="ib1")
    assert [found[name] for name in names] == ["ib0", "ib1"]
