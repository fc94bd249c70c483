"""What a user's precision file fixes stays as the job runs it, under every plan."""

import re
from pathlib import Path

import pytest
import yaml

from megatron_snip.reporting.precision_record import PrecisionRecord, read_precision
from tests.distributed.launch import Run
from tests.megatron.fast_flags import GATHERED_BF16, MXFP8, NVFP4, SHORT
from tests.megatron.lab import (
    COLLECT_ONLY,
    MODEL,
    SCRIPT,
    SNIP,
    WITH_TE,
    Lab,
    applied_plans,
    logged,
    recipes_of,
    snip_lines,
)
from tests.schema_check import check_run

BF16_RULES = ("*.linear_qkv", "*.linear_proj", "*.fc?_latent_proj", "mtp.*")
"""The modules that NVIDIA's file for Nemotron 3 Super keeps in BF16."""

LOCAL_RULE = "decoder.layers.1.mlp.linear_fc2"
"""On each of two pipeline stages it is another layer: 1 and 3."""

PLANS = [*SNIP, "--snip-efficiency-target", "0.25"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = {"transformer_engine_config_type": "TEQuantizationParams"}
    configs = {
        "bf16": {**kind, "training_recipe": {}, "evaluation_recipe": {}},
        "mxfp8": {
            **kind,
            "training_recipe": {
                "fp8_quantization_recipe": "mxfp8",
                "override_quantized_autocast": True,
                "override_nonquantized_autocast": True,
            },
        },
    }
    rules = {**dict.fromkeys(BF16_RULES, "bf16"), LOCAL_RULE: "mxfp8"}
    matchers = {
        pattern: {"type": "glob", "pattern": pattern, "config": config, "enabled": True}
        for pattern, config in rules.items()
    }
    path = tmp_path_factory.mktemp("rules") / "precision.yaml"
    path.write_text(yaml.safe_dump({"configs": configs, "matchers": matchers}, sort_keys=False))
    return path


def record_of(output: Path, iteration: int) -> PrecisionRecord:
    return read_precision(output / "precision" / f"{iteration}.json")


def fixed_in(output: Path, iteration: int) -> dict[str, str]:
    rows = record_of(output, iteration).linears
    return {row.name: row.fixed for row in rows if row.fixed is not None}


CLASSES = {"bf16": "bf16", "mxfp8": "MXFP8BlockScaling", "nvfp4": "NVFP4BlockScaling"}
"""Transformer Engine's class of each recipe."""


def check_what_ran(run: Run, iteration: int) -> PrecisionRecord:
    """The recorded recipes are those with which the modules ran their last forward."""
    ran = {name: recipe for rank in run.finished() for name, recipe in rank["recipes"].items()}
    record = record_of(run.output, iteration)
    recorded = {each.name: CLASSES[each.recipe] for each in record.linears}
    assert {name: ran[name] for name in recorded} == recorded
    return record


@pytest.mark.parametrize("precision", [[], NVFP4], ids=["bf16", "nvfp4"])
def test_a_plan_leaves_what_a_file_fixes(te_lab: Lab, file: Path, precision: list[str]) -> None:
    job = [*precision, "--te-precision-config-file", str(file)]
    plain = te_lab.run("te pp2", job, plain=True)
    run = te_lab.run("te pp2", [*job, *PLANS])
    run.finished()
    assert applied_plans(run) == [5, 9], run.report
    assert [logged(run)[i] for i in range(1, 5)] == [logged(plain)[i] for i in range(1, 5)]
    for iteration in (5, 9):
        recipes = recipes_of(run.output, iteration)
        attention = {name for name in recipes if "self_attention" in name}
        local = {f"decoder.layers.{i}.mlp.linear_fc2" for i in (1, 3)}
        assert {recipes[name] for name in attention} == {"bf16"}
        assert {recipes[name] for name in local} == {"mxfp8"}
        assert "nvfp4" in recipes.values()
        by_file = fixed_in(run.output, iteration)
        assert by_file == dict.fromkeys(attention | local, "--te-precision-config-file")
    lines = snip_lines(run)
    assert sum("10 of 16 linears are fixed: 10 by --te-precision-config-file" in x for x in lines)
    unused = "2 rules of --te-precision-config-file decide for no module of any rank: "
    assert sum(f"{unused}*.fc?_latent_proj (bf16), mtp.* (bf16)" in line for line in lines) == 1
    record = check_what_ran(run, 9)
    unused_rules = ("*.fc?_latent_proj (bf16)", "mtp.* (bf16)")
    assert record.unused_rules == tuple(f"--te-precision-config-file: {x}" for x in unused_rules)
    settings = yaml.safe_load((run.output / "config.yaml").read_text())
    assert settings["fixed"]["--te-precision-config-file"]["linears"] == 10
    assert settings["snip"]["pins"] == []


@pytest.mark.parametrize("stored", [False, True], ids=["bf16-weights", "stored"])
def test_a_job_that_only_measures_records_what_its_file_makes_it_run(
    te_lab: Lab, file: Path, stored: bool
) -> None:
    """Recipe and storage of every weight are those of the modules, without any plan."""
    job = [*(GATHERED_BF16 if stored else MXFP8), "--te-precision-config-file", str(file)]
    run = te_lab.run("te dp2", [*job, *SHORT, *COLLECT_ONLY])
    record = check_what_ran(run, 1)
    stores = {name for rank in run.finished() for name in rank["quantized"]}
    assert bool(stores) == stored
    assert len(fixed_in(run.output, 1)) == 5
    for each in record.linears:
        assert (each.weight_storage != "bfloat16") == (f"{each.name}.weight" in stores)
    assert len(check_run(run.output)) == 8  # all but calibration.json
    summary = "\n".join(snip_lines(run))
    assert "linears: bf16 (te: bf16)" in summary and "linears: fp8 (te: mxfp8)" in summary


def test_pins_go_before_the_file_and_give_linears_back(te_lab: Lab, file: Path) -> None:
    job = [*NVFP4, "--te-precision-config-file", str(file)]
    pins = ["--snip-pins", "*.0.*.linear_qkv=fp4,*.linear_fc2=free", "--snip-formats", "bf16,fp4"]
    run = te_lab.run("te", [*job, *PLANS, *pins])
    run.finished()
    assert applied_plans(run) == [5, 9], run.report
    name = "decoder.layers.0.self_attention.linear_qkv"
    assert recipes_of(run.output, 5)[name] == "nvfp4"
    found = fixed_in(run.output, 5)
    assert found.pop(name) == "--snip-pins"
    assert len(found) == 7 and all("self_attention" in each for each in found)


BY_RANK = """
import os, runpy, sys
file = sys.argv[1 + int(os.environ["RANK"])]
sys.argv = [*sys.argv[3:], "--te-precision-config-file", file]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("layout", ["te pp2", "te dp2"])
def test_a_pipeline_stage_may_have_a_file_of_its_own_and_a_rank_may_not(
    te_lab: Lab, file: Path, tmp_path: Path, layout: str
) -> None:
    """As `megatron-snip export` writes them; a stale copy on one node looks the same otherwise."""
    other = tmp_path / "other.yaml"
    other.write_text(file.read_text().replace(LOCAL_RULE, "decoder.layers.0.mlp.linear_fc2"))
    script = tmp_path / "by_rank.py"
    script.write_text(BY_RANK)
    ranks, parallel = WITH_TE[layout]
    words = ["--cpu", str(script), str(file), str(other), SCRIPT, *MODEL.split(), *parallel]
    output = ["--snip-output-dir", str(tmp_path / "snip")]
    run = te_lab.run_words(ranks, [*words, *NVFP4, *PLANS, *output], {}, plain=False)
    if layout == "te dp2":
        assert run.statuses == (2, 2), run.report
        (line,) = re.findall("error: (the ranks have other settings: .*)", run.logs[0])
        assert line.startswith(
            "the ranks have other settings: --te-precision-config-file of pipeline stage 0 is one "
            "with SHA-256 "
        )
        assert " on rank 0, one with SHA-256 " in line and " on rank 1; start all" in line
        return
    run.finished()
    local = {name for name in fixed_in(tmp_path / "snip", 5) if "mlp" in name}
    assert local == {"decoder.layers.1.mlp.linear_fc2", "decoder.layers.2.mlp.linear_fc2"}
