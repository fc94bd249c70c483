"""Every patch in every supported release: its function exists and has the parameters.

Releases older than the installed one come unpacked, one folder each, below MEGATRON_RELEASES.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from megatron.core.package_info import __version__ as installed

from tests.distributed.launch import RANK_ENVIRONMENT
from tests.processes import ROOT, run_python

FOLDER = Path(os.environ.get("MEGATRON_RELEASES", "/nonexistent"))
RELEASES = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")
WITHOUT_TRAINING = "0.16.1"
"""Its wheel has no megatron.training; that came with checkouts alone."""

OLD_VALIDATION = "megatron.training.initialize.validate_args"
OPTIONAL = ("megatron.legacy.fused_kernels.load", OLD_VALIDATION)
OLD_PATCHES = {"0.17.1": (OLD_VALIDATION,)}
"""Patches that some releases need; the kernels of 0.16 came with checkouts."""

PROBE = """
import json
from megatron_snip.patches import cpu
cpu.install(claim_cuda=True)
from megatron_snip.patches.install import CORE_PATCHES, MEGATRON_LM
from megatron_snip.patches.registry import CORE
patches = (*CORE_PATCHES, *MEGATRON_LM.patches)
states = [[p.target, p.optional, p.problem()] for p in patches]
print("PROBE" + json.dumps({"version": CORE.version, "states": states}))
"""


def probe(release: str) -> dict[str, Any]:
    paths = [str(ROOT)]
    if not installed.startswith(release):
        folder = FOLDER / release
        if not folder.is_dir():
            pytest.skip(f"megatron-core {release} is not unpacked below {FOLDER}")
        paths.insert(0, str(folder))
    environment = {**RANK_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    done = run_python("-c", PROBE, timeout=200, **environment)
    lines = [x for x in done.stdout.splitlines() if x.startswith("PROBE")]
    assert lines, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(lines[0].removeprefix("PROBE"))
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_patches(release: str) -> None:
    found = probe(release)
    assert found["version"].startswith(release)
    for target, is_optional, problem in found["states"]:
        may_lack = release != RELEASES[-1] or target.startswith("transformer_engine")
        if is_optional and may_lack and target not in OLD_PATCHES.get(release, ()):
            continue  # newer than the release, or of Transformer Engine, which is not installed
        in_wheel = target.startswith("megatron.core") or release != WITHOUT_TRAINING
        wanted = target in OLD_PATCHES.get(release, ()) or (in_wheel and target not in OPTIONAL)
        assert (problem is None) == wanted, f"{target}: {problem}"
