"""Preflight of a command line says what the job of that command line then does."""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from megatron.training.arguments import add_megatron_arguments

from tests.distributed.launch import Run
from tests.megatron.fast_flags import FUSED_EXPERTS, MXFP8
from tests.megatron.lab import EXPERTS, MODEL, SCRIPT, TE, WITH_TE, Lab, runnable, snip_lines
from tests.recipes import load

RECIPES = (
    "llama3_8b_pretrain_8gpu_h100_bf16",
    "llama3_8b_pretrain_8gpu_h100_fp8cs",
    "llama3_70b_pretrain_64gpu_b300_fp8mx",
    "llama3_70b_pretrain_64gpu_b300_nvfp4",
    "llama31_405b_pretrain_128gpu_b300_nvfp4",
    "deepseek_v3_pretrain_1024gpu_h100_fp8sc",
    "deepseek_v3_pretrain_256gpu_b200_bf16",
    "qwen3_235b_a22b_pretrain_64gpu_b200_fp8mx",
    "qwen3_235b_a22b_pretrain_256gpu_b200_nvfp4",
    "kimi_k2_pretrain_256gpu_b200_fp8cs",
)
OF_A_RECIPE = {
    *("fp8", "fp8_recipe", "fp8_param_gather", "fp4", "fp4_recipe", "fp4_param_gather"),
    *("reuse_grad_buf_for_mxfp8_param_ag", "overlap_param_gather", "use_distributed_optimizer"),
    *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "first_last_layers_bf16"),
    *("moe_grouped_gemm", "mtp_num_layers", "sequence_parallel"),
}
SNIP = ["--snip", "--snip-interval", "4", "--snip-start-step", "3", "--snip-lag", "1"]


def cases() -> Iterator[tuple[str, str, list[str], dict[str, str]]]:
    """(name, layout, Megatron's flags, environment)."""
    for name, args in load():
        if name in RECIPES:
            layout = "te tp2" if getattr(args, "sequence_parallel", False) else "te"
            yield name, layout, recipe_words(vars(args)), {}
    yield "fused experts", "te ep2", [*MXFP8, "--use-transformer-engine-op-fuser"], FUSED_EXPERTS
    # On the CPU the job has no such fusion, and preflight is about the GPU's job.
    yield "torch's FSDP", "te fsdp2", ["--no-gradient-accumulation-fusion"], {}
    yield "Megatron's FSDP", "te megatron-fsdp", MXFP8, {}
    for layout in (
        *("hybrid-pp2", "te vpp2", "delta-net", "dsa", "latent"),
        *("te embedding alone", "te first stage short"),
        *("te last stage short", "te embedding and loss as layers", "te prediction alone"),
    ):
        yield layout, layout, [], {}
    for layout in ("mtp", "mtp-repeated"):
        yield layout, layout, TE, {}


def recipe_words(settings: dict[str, Any]) -> list[str]:
    """The command line of a recipe's settings."""
    words = []
    actions = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._actions
    for action in actions:
        value = settings.get(action.dest)
        if action.dest not in OF_A_RECIPE or value is None:
            continue
        if action.nargs != 0:
            words += [action.option_strings[0], str(value)]
        elif action.const == value:
            words.append(action.option_strings[0])
    if "moe_grouped_gemm" in settings:
        words += [*EXPERTS, "--expert-model-parallel-size", "1"]  # the later one counts
        words += ["--moe-token-dispatcher-type", "alltoall"]
    if "fp8_param_gather" in settings and "use_distributed_optimizer" not in settings:
        words.append("--use-distributed-optimizer")
    if "overlap_param_gather" in settings:
        words.append("--overlap-grad-reduce")
    if "mtp_num_layers" in settings:
        words += ["--position-embedding-type", "rope"]
    return words


def preflight(
    lab: Lab, layout: str, flags: list[str], environment: dict[str, str] | None = None
) -> tuple[Run, dict[str, Any]]:
    ranks, parallel = WITH_TE[layout]
    if "fsdp" in layout:  # as on the job's machines
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", **(environment or {})}
    head = ["preflight", "--json", "--gpus", str(ranks), "--capability", "10.0"]
    words = [*head, SCRIPT, *MODEL.split(), *parallel, *flags]
    run = lab.run_words(1, words, environment or {}, plain=False)
    text = run.logs[0]
    return run, json.loads(text[text.index("{") : text.rindex("}") + 1]) if "{" in text else {}


@pytest.mark.parametrize(
    ("name", "layout", "flags", "environment"), [pytest.param(*c, id=c[0]) for c in cases()]
)
def test_it_says_what_the_job_then_does(
    te_lab: Lab, name: str, layout: str, flags: list[str], environment: dict[str, str]
) -> None:
    flags = [*flags, "--train-iters", "4", *SNIP]
    run, found = preflight(te_lab, layout, flags, environment)
    job = te_lab.run(layout, flags, environment)
    assert job.statuses == (0,) * len(job.statuses), job.report
    assert run.statuses == (0,) and not found["refused"], run.report
    settings = yaml.safe_load((job.output / "config.yaml").read_text())
    assert settings["snip"]["formats"] == found["formats"]
    assert settings.get("fixed", {}) == found["fixed"]
    problem = json.loads((job.output / "problems" / "3.json").read_text())
    for key in ("pins", "ties", "stage_layers", "target"):
        assert found["problem"].get(key) == problem.get(key), key
    # What no backward reaches keeps its option in the job's problem; preflight cannot know that.
    # Sparse attention multiplies the weight of `linear_kv_up_proj` itself.
    unmeasured = {row["name"] for row in problem["linears"] if not row.get("statistics")}
    assert not unmeasured or name == "dsa"
    of_job = [row for row in runnable(problem) if row[0] not in unmeasured]
    assert [row for row in runnable(found["problem"]) if row[0] not in unmeasured] == of_job
    on_stage = Counter(row["stage"] for row in problem["linears"])
    assert found["linears"]["by stage"] == {
        str(stage): on_stage[stage] for stage in range(len(problem["stage_layers"]))
    }
    assert found["linears"]["sharded by FSDP"] == ("FSDP" in name)
    lines = [line for line in snip_lines(job) if "linears are small" in line]
    assert [hint for hint in found["hints"] if hint not in lines[0]] == [], job.report


def test_all_that_is_refused_is_named_at_once(te_lab: Lab) -> None:
    flags = ["--cuda-graph-impl", "local", "--perform-rl-step"]
    flags += ["--snip", "--snip-pins", "nothing=bf16"]
    run, found = preflight(te_lab, "te", flags)
    assert run.statuses == (2,) and len(found["refused"]) == 3, run.report
    refused = " ".join(found["refused"])
    for word in ("--cuda-graph-impl local", "--perform-rl-step", "--snip-pins: 'nothing'"):
        assert word in refused


def test_an_error_in_a_plugin_is_named_with_its_file(te_lab: Lab, tmp_path: Path) -> None:
    script = tmp_path / "pretrain.py"
    script.write_text(f"import runpy\nrunpy.run_path({SCRIPT!r}, run_name='__main__')\n")
    plugin = tmp_path / "broken_snip.py"
    plugin.write_text(
        "from megatron_snip.planning.policies import POLICIES, Policy\n"
        "def decide(request):\n"
        "    return {}['no entry']\n"
        "POLICIES['broken'] = Policy('broken', decide, needs_statistics=False)\n"
    )
    flags = ["--snip", "--snip-plugins", "broken_snip", "--snip-policy", "broken"]
    words = ["preflight", str(script), *MODEL.split(), *WITH_TE["te"][1], *flags]
    run = te_lab.run_words(1, words, {}, plain=False)
    (line,) = [x for x in run.logs[0].splitlines() if x.startswith("megatron-snip: ")]
    assert run.statuses == (1,) and "KeyError: 'no entry'" in line, run.report
    assert line.endswith(f"(in a plugin: {plugin}:3)")
    assert "Traceback" in run.logs[0]


def test_mistakes_are_one_line(te_lab: Lab, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger.py"
    stranger.write_text("import json\nprint(json.dumps({}))\n")
    poor = tmp_path / "poor.py"
    poor.write_text("import megatron.training\nimport no_such_package\n")
    model = MODEL.split()
    for words, said in (
        ([str(tmp_path / "absent.py")], "cannot find the script"),
        ([str(stranger)], "does not reach"),
        ([str(poor)], "No module named 'no_such_package'"),
        ([SCRIPT, *model, "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        ([SCRIPT, *model, "--snip-no-such"], "unknown flag --snip-no-such"),
        ([SCRIPT, *model, "--snip-interval", "-1"], "--snip-interval"),
        ([SCRIPT, *model, "--tensor-model-parallel-size", "3"], "Megatron"),
        ([SCRIPT, *model[:-4], "--num-layers", "0"], "Megatron"),
    ):
        before = sorted(tmp_path.iterdir())
        run = te_lab.run_words(1, ["preflight", *words], {}, plain=False)
        lines = [line for line in run.logs[0].splitlines() if line.startswith("megatron-snip:")]
        assert run.statuses == (2,) and len(lines) == 1 and said in lines[0], run.report
        assert sorted(tmp_path.iterdir()) == before
