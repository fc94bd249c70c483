"""Preflight without a script: a world of many ranks, stages as ranks, and what things cost."""

import json
import logging
import runpy
from argparse import Namespace
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide

from benchmarks.machine import RESULTS
from megatron_snip.__main__ import main
from megatron_snip.cli import preflight
from megatron_snip.cli.preflight import _BLACKWELL, _higher_target, _screen
from megatron_snip.collectives import RemoteFailure
from megatron_snip.errors import UnsupportedError, UsageError
from megatron_snip.log import forget_warnings
from megatron_snip.patches.preflight import costs, examine
from megatron_snip.patches.preflight.examine import Preflight
from megatron_snip.patches.preflight.job import BRIDGE_LOOP, BuiltJob, least_ranks
from megatron_snip.patches.preflight.refusal import refusing
from megatron_snip.patches.preflight.stages import Stage, groups_of, on_all
from megatron_snip.patches.preflight.world import World, gpu_of
from megatron_snip.topology import Topology
from tests.processes import ROOT, run_python


def stages(size: int) -> list[Stage]:
    return [
        Stage([], Topology(rank=rank, world_size=size, control=group.control), group)
        for rank, group in enumerate(groups_of(size))
    ]


def test_stages_exchange_as_ranks_do() -> None:
    def act(stage: Stage) -> Any:
        control = stage.topology.control
        gathered = control.gather("test", lambda: stage.topology.rank // 2)
        total = control.sum_(torch.tensor([float(stage.topology.rank)]))
        return list(gathered.by_rank()), float(total)

    assert on_all(stages(5), act) == [([0, 0, 1, 1, 2], 10.0)] * 5


def test_what_one_stage_refuses_all_refuse() -> None:
    def act(stage: Stage) -> Any:
        def refuse() -> None:
            if stage.topology.rank == 2:
                raise UnsupportedError("not here")

        return stage.topology.control.gather("test", refuse)

    with pytest.raises(UnsupportedError, match="not here"):
        on_all(stages(3), act)


def test_a_stage_that_fails_alone_ends_the_others() -> None:
    def act(stage: Stage) -> Any:
        if stage.topology.rank == 1:
            raise ZeroDivisionError("alone")
        return stage.topology.control.gather("test", lambda: 0)

    with pytest.raises(ZeroDivisionError, match="alone"):
        on_all(stages(4), act)


def test_a_message_that_nobody_read_is_not_the_next_ones() -> None:
    """A stage that fails after others have sent to it leaves their messages unread."""
    of_two = stages(2)

    def act(stage: Stage) -> Any:
        if stage.topology.rank == 0:
            raise UnsupportedError("before it receives")
        return stage.topology.control.gather("first", lambda: "stale")

    with pytest.raises(UnsupportedError, match="before it receives"):
        on_all(of_two, act)
    gathered = on_all(
        of_two, lambda s: s.topology.control.gather("second", lambda: s.topology.rank)
    )
    assert list(gathered[0].by_rank()) == [0, 1]


def test_the_screen_has_each_hint_and_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    linears = {"all": 16, "of experts": 0, "experts": 0, "by stage": {0: 4, 1: 0, 2: 12}}
    linears |= {"parameters of a rank": [5e8, 0, 15e8], "sharded by FSDP": False}
    found = Preflight(layout={"ranks": 3, "PP": 3}, linears=linears, hints=["one", "two"])
    screen = {line[:12].strip(): line[12:] for line in _screen(found, "s.py").splitlines()}
    assert screen["linears"] == (
        "16, 0 to 12 on a pipeline stage; at most 1.5 billion parameters on a rank"
    )
    lines = _screen(found, "s.py").splitlines()
    assert [line for line in lines if line.startswith("hint")] == [
        "hint        one",
        "hint        two",
    ]
    found = Preflight(layout={"ranks": 3}, linears={**linears, "sharded by FSDP": True})
    assert "hint" not in _screen(found, "s.py")
    assert "billion parameters on a rank, before FSDP shards them" in _screen(found, "s.py")


@pytest.mark.parametrize(
    ("runs", "own", "best", "expected"),
    [
        (0.75, 0.99, 1.0, 0.89),
        (0.75, 0.8, 1.0, None),
        (0.75, 0.75, 1.0, None),
        (0.9, 1.0, 1.0, None),
    ],
)
def test_an_advised_target_moves_fewer_flops(
    runs: float, own: float, best: float, expected: float | None
) -> None:
    target: dict[str, float | None] = {"runs": runs, "job": own, "best": best}
    assert _higher_target(Preflight(target=target)) == expected


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("llama3_8b_pretrain_8gpu_b300_fp8mx", True),
        ("gb200", True),
        ("--fp8-recipe=mxfp8", True),
        ("/data/web200k", False),
        ("checkpoints/1b300k", False),
    ],
)
def test_a_newer_gpu_is_a_word_of_its_own(word: str, expected: bool) -> None:
    assert bool(_BLACKWELL.search(word)) is expected


def test_a_refusal_is_one_line_and_a_bug_stays_a_bug(tmp_path: Path) -> None:
    """By the code that ran last, whatever the type: Megatron refuses by errors of any type."""
    script = tmp_path / "script.py"
    script.write_text("{}['absent']")
    for action, said in (
        (lambda: divide(3, 2), "M: 3 is not divisible by 2"),  # an assertion
        (lambda: TransformerConfig(num_layers=1), "M: ZeroDivisionError: .*config.py:"),
        (lambda: runpy.run_path(str(script), run_name="__main__"), "M: KeyError: .*script.py:1"),
    ):
        with pytest.raises(UsageError, match=said) as refused, refusing("M"):
            action()
        assert "\n" not in str(refused.value)
    with pytest.raises(TypeError), refusing("M"):
        least_ranks(SimpleNamespace(tensor_model_parallel_size=Namespace()))  # ours
    with pytest.raises(UnsupportedError), refusing("M"):
        raise UnsupportedError("as it is")


@pytest.mark.parametrize("place", ["built", "examined"])
def test_a_bug_in_preflight_leaves_its_traceback(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the model is built, or in what all stages do together, which logs it."""
    script = tmp_path / "script.py"
    script.write_text("import megatron.core\n")

    def broken(*args: Any) -> Any:
        return {}["absent"]

    def built(*args: Any) -> Any:
        logging.getLogger("megatron.bridge").error("noise")
        if place == "built":
            broken()
        with pytest.raises(RemoteFailure) as error:
            on_all(stages(1), lambda stage: stage.topology.control.gather("it", broken))
        raise error.value

    monkeypatch.setattr(preflight, "built", built)
    forget_warnings()
    assert main(["preflight", str(script)]) == 1
    text = capsys.readouterr().err
    (line,) = [line for line in text.splitlines() if line.startswith("megatron-snip: ")]
    assert "KeyError: 'absent'" in line
    assert "Traceback" in text and "in broken" in text
    assert "noise" not in text


@pytest.mark.parametrize("loop", [BRIDGE_LOOP, "Megatron-LM"])
def test_every_text_about_a_bridge_job_has_bridges_names(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "--te-precision-config-file"

    def fill(found: Preflight, config: Any, both: Any) -> Any:
        of_type = {str: text, list: [text], dict: {text: {"by": [{text: text}], 1: 2.0}}}
        for each in fields(found):
            if type(getattr(found, each.name)) in of_type:
                setattr(found, each.name, of_type[type(getattr(found, each.name))])
        return config

    monkeypatch.setattr(examine, "_check_flags", fill)
    monkeypatch.setattr(examine, "_models", lambda *_: None)
    monkeypatch.setattr(examine, "_layout", lambda _: {text: 1})
    (stage,) = stages(1)
    chunk: Any = torch.nn.Module()
    chunk.config = SimpleNamespace()
    stage.chunks.append(chunk)
    found = asdict(examine.examine(BuiltJob(1, {}, stages=[stage], loop=loop)))
    named = [name for name, value in found.items() if text in str(value)]
    if loop == BRIDGE_LOOP:
        own = "model.quant_recipe"
        assert not named and found["formats_why"] == own
        assert found["fixed"] == {own: {"by": [{own: own}], 1: 2.0}}
    else:
        assert {"fixed", "formats_why", "hints", "unknown", "recipes"} < set(named)


def build_large_layout(path: Path) -> None:
    """Build four stages of a model of 512 ranks, and write what was built."""
    from tests.models import build as build_model

    world = World(512)
    job = BuiltJob(512, {}, world=world)
    shapes = {"hidden_size": 8192, "ffn_hidden_size": 28672, "num_attention_heads": 64}
    shapes |= {"num_query_groups": 8, "num_layers": 8, "sequence_parallel": True}
    layout = {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 4}
    shapes |= {**layout, "pipeline_dtype": torch.bfloat16, "use_cpu_initialization": False}
    with gpu_of((9, 0)), world.installed():
        world.start(**layout)
        job.build(lambda: [build_model(te=False, **shapes)])
    tops = [stage.topology for stage in job.stages]
    devices = {p.device.type for s in job.stages for c in s.chunks for p in c.parameters()}
    found = {
        "ranks": [top.rank for top in tops],
        "stages": [top.stage for top in tops],
        "data": [top.data.size for top in tops],
        "devices": sorted(devices),
    }
    path.write_text(json.dumps(found))


def test_a_large_layout_is_built_on_the_meta_device(tmp_path: Path) -> None:
    """512 ranks of TP 8 and PP 4, as `fake` process groups.

    In a new process, as in the command: a copy of one that had other process groups can crash.
    """
    path = tmp_path / "found.json"
    module = "tests.unit.patches.test_preflight"
    code = (
        f"from pathlib import Path; import {module} as m; m.build_large_layout(Path({str(path)!r}))"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["stages"] == [0, 1, 2, 3] and found["ranks"] == [0, 128, 256, 384]
    assert found["data"] == [16] * 4 and found["devices"] == ["meta"]


def test_the_fewest_ranks_of_a_layout() -> None:
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4}
    assert least_ranks(Namespace(**layout)) == 8
    experts = {"expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1}
    assert least_ranks(Namespace(**layout, **experts)) == 32


def test_the_numbers_are_those_of_the_benchmarks() -> None:
    row = json.loads((RESULTS / "scale.jsonl").read_text().splitlines()[1])
    assert row["hop_us"] == pytest.approx(1e6 * costs.HOP_S, rel=0.01)
    assert 1e6 * row["mb_per_s"] == pytest.approx(costs.BYTES_PER_S, rel=0.01)
    model = row["models"]["Llama-405B TP8 PP16"]
    computed = costs.control_seconds(costs.SCALE_LINEARS, 16384)
    for phase, seconds in computed.items():
        assert seconds == pytest.approx(model["computed_s"]["16384"][phase], rel=0.02)
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert all(str(ratio) in page for ratio in costs.MEASURED_OVER_BASELINE)
