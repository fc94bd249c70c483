"""Every patch in every supported release: its function exists, or is known to be missing there.

Releases older than the installed one come unpacked, one folder each, below MEGATRON_RELEASES.
"""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from megatron.core.package_info import __version__ as installed

from tests.distributed.launch import RANK_ENVIRONMENT
from tests.processes import ROOT, run_python

FOLDER = Path(os.environ.get("MEGATRON_RELEASES", "/nonexistent"))
TRAINING = "megatron.training."
WITHOUT_TRAINING = "0.16.1"
"""Its wheel has no megatron.training; that came with checkouts alone."""

NOWHERE = {
    "megatron.legacy.fused_kernels.load",  # of 0.16 too, in checkouts
    "transformer_engine.pytorch.module.base.initialize_ub",  # it is not installed
}
BUFFERS = {
    f"megatron.core.transformer.moe.paged_stash.PagedStashRunner.{name}"
    for name in ("__call__", "prepare_for_rerun")
}
FREED_INPUTS = "megatron.core.models.common.utils.should_free_input"
OLD_FREED_INPUTS = "megatron.core.models.gpt.fine_grained_callables.should_free_input"
OLD_VALIDATION = "megatron.training.initialize.validate_args"
ABSENT = {
    "0.16.1": {*NOWHERE, *BUFFERS, FREED_INPUTS},
    "0.17.1": {*NOWHERE, *BUFFERS, FREED_INPUTS},
    "0.18.2": {*NOWHERE, FREED_INPUTS, OLD_VALIDATION},
    "0.19.2": {*NOWHERE, OLD_FREED_INPUTS, OLD_VALIDATION},
}
"""What a release lacks of what is patched; it has all else."""

PROBE = """
import json
from types import SimpleNamespace
from megatron_snip.patches import cpu
cpu.install(claim_cuda=True)
from megatron.core.transformer import TransformerConfig
from megatron_snip.patches import expert_overlap
from megatron_snip.patches.install import CORE_PATCHES, MEGATRON_LM
from megatron_snip.patches.registry import CORE, Registry

patches = (*CORE_PATCHES, *MEGATRON_LM.patches)
absent = {p.target: p.problem() for p in patches if p.problem() is not None}
given = [p.target for p in patches]
required = [p.target for p in patches if not p.optional]

overlap = (expert_overlap.freed_inputs, expert_overlap.freed_inputs_before_0_19)
registry = Registry(overlap)
registry.install({"--snip"})
owner = next(p.find()[0] for p in overlap if p.problem() is None)
config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
config.moe_token_dispatcher_type = "alltoall"
settings = {"config": config, "is_moe": True, "num_local_experts": 1}

def is_freed(fp8, run_as_the_job):
    config.fp8 = fp8
    model = SimpleNamespace(experts_run_as_the_job=run_as_the_job)
    registry.session.controller = SimpleNamespace(model=model, close=lambda: None)
    part = owner.TransformerLayerNode(None, None, None, None, None, "mlp", extra_args=settings)
    return part.free_input

freed = {
    "bf16": is_freed(None, True),
    "fp8": is_freed("e4m3", True),
    "plan": is_freed("e4m3", False),
}
found = {"version": CORE.version, "given": given, "required": required}
print("PROBE" + json.dumps({**found, "absent": absent, "freed": freed}))
"""


@cache
def probe(release: str) -> dict[str, Any]:
    paths = [str(ROOT)]
    if not installed.startswith(release):
        folder = FOLDER / release
        if not folder.is_dir():
            pytest.skip(f"megatron-core {release} is not unpacked below {FOLDER}")
        paths.insert(0, str(folder))
    environment = {**RANK_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    done = run_python("-c", PROBE, timeout=400, **environment)
    lines = [x for x in done.stdout.splitlines() if x.startswith("PROBE")]
    assert lines, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(lines[0].removeprefix("PROBE"))
    return found


@pytest.mark.parametrize("release", ABSENT)
def test_patches(release: str) -> None:
    found = probe(release)
    assert found["version"].startswith(release)
    absent = set(ABSENT[release])
    if release == WITHOUT_TRAINING:
        absent |= {target for target in found["given"] if target.startswith(TRAINING)}
    assert set(found["absent"]) == absent, found["absent"]
    required = {x for x in found["required"] if release != WITHOUT_TRAINING or TRAINING not in x}
    assert not required & absent


@pytest.mark.parametrize("release", ABSENT)
def test_what_frees_the_experts_input_asks_the_plan(release: str) -> None:
    """Megatron's own part of a layer under expert-parallel overlap is built, one expert a rank."""
    freed = probe(release)["freed"]
    assert freed["fp8"]
    assert freed["plan"] == freed["bf16"]
    assert freed["bf16"] == (release == "0.16.1")  # which frees it in every precision
