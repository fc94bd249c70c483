"""`megatron-snip export` and `import`: plans for other programs, and precision files back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_snip.__main__ import main
from megatron_snip.planning.plan import read_plan, write_plan
from megatron_snip.planning.problem import OptionCost, write_problem
from megatron_snip.planning.stage_layers import StageLayers
from tests.unit.planning.build import name_of, options_of, plan_of, problem_of

EXPORT = ["export", "plan.json", "--output", "out.yaml", "--capability"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_plan(plan_of(["fp4", "fp8", "bf16", "fp4"]), Path("plan.json"))
    write_problem(problem_of([[0.0, 1.0]] * 4, flops=[1.0, 2.0, 3.0, 4.0]), Path("problem.json"))
    return tmp_path


@pytest.fixture
def imported(printed: Any) -> Callable[..., list[str]]:
    def run(*words: str) -> list[str]:
        printed("import", *words, "--problem", "problem.json", "--output", "back.json")
        return options_of(read_plan(Path("back.json")))

    return run


def test_a_plan_for_blackwell(folder: Path, printed: Any, imported: Any) -> None:
    text = printed(*EXPORT, "10.0")
    assert "wrote out.yaml: 4 matchers" in text
    assert "fp4: nvfp4 (2 linears)" in text and "fp8: mxfp8 (1 linears)" in text
    config = yaml.safe_load(Path("out.yaml").read_text())
    recipe = config["configs"]["fp4"]["training_recipe"]
    assert recipe["fp4_quantization_recipe"] == "nvfp4"
    # What comes back names the formats that Transformer Engine runs.
    assert imported("out.yaml") == ["nvfp4", "mxfp8", "bf16", "nvfp4"]
    back = read_plan(Path("back.json"))
    assert list(back.linears) == [name_of(layer) for layer in range(4)]
    assert back.policy == "imported" and back.efficiency == pytest.approx(0.5)


def test_each_entry_can_say_how_its_weight_is_stored(
    folder: Path, printed: Any, imported: Any
) -> None:
    write_plan(plan_of(["fp4", "fp8", "bf16", "fp8-fp8-bf16"]), Path("plan.json"))
    text = printed(*EXPORT, "10.0", "--fp8-param")
    configs = yaml.safe_load(Path("out.yaml").read_text())["configs"]
    stored = {
        name: (config["training_recipe"]["fp8_param"], config["training_recipe"]["fp4_param"])
        for name, config in configs.items()
    }
    assert stored == {
        "fp4": (False, True),
        "fp8": (True, False),
        "bf16": (False, False),
        "fp8-fp8-bf16": (False, False),
    }
    assert "With --fp4-param-gather weights are stored as the file says." in text
    assert imported("out.yaml") == ["nvfp4", "mxfp8", "bf16", "mxfp8-mxfp8-bf16"]
    text = printed("import", "out.yaml", "--problem", "problem.json", "--output", "back.json")
    assert "fp8_param and fp4_param are left out: a plan does not say how weights are sto" in text
    printed(*EXPORT, "10.0")
    assert "fp8_param" not in Path("out.yaml").read_text()
    text = printed("import", "out.yaml", "--problem", "problem.json", "--output", "back.json")
    assert "are left out" not in text


def test_a_weight_stored_in_the_runs_own_delayed_scaling_is_imported(
    folder: Path, printed: Any, imported: Any
) -> None:
    write_plan(plan_of(["fp8", "bf16", "fp8", "bf16"]), Path("plan.json"))
    printed(*EXPORT, "10.0", "--fp8-recipe", "delayed", "--fp8-param")
    assert "fp8_param: true" in Path("out.yaml").read_text()
    assert imported("out.yaml", "--base", "fp8") == ["fp8", "bf16", "fp8", "bf16"]
    words = ("import", "out.yaml", "--problem", "problem.json", "--output", "back.json")
    warning = "the file leaves linears in the job's own precision, which is taken as bf16"
    assert warning in printed(*words)
    assert warning not in printed(*words, "--base", "fp8")


def test_the_flags_that_the_run_needs_are_printed(folder: Path, printed: Any) -> None:
    """Megatron has one low precision a run; that with the widest padding of experts' tokens."""

    def needs(capability: str, *options: str) -> str:
        write_plan(plan_of(list(options)), Path("plan.json"))
        return printed(*EXPORT, capability, "--nearest").split("The run needs:\n")[1]

    mixed = needs("10.0", "fp4", "fp8", "bf16", "fp4")
    assert [line.strip() for line in mixed.splitlines() if line.startswith("  ")] == [
        "--transformer-impl transformer_engine",
        "--bf16",
        "--fp4-format e2m1 --fp4-recipe nvfp4",
        "--te-precision-config-file out.yaml",
    ]
    assert "--fp4-format is needed: without it" in mixed and "not add --fp8-param-gather" in mixed
    assert "does not name run in the job's own precision" in mixed
    assert "  --fp8-format e4m3 --fp8-recipe mxfp8\n" in needs("10.0", "fp8", "bf16")
    hopper = needs("9.0", "fp4", "fp8", "fp8-fp8-bf16")
    assert "  --fp8-format e4m3 --fp8-recipe blockwise\n" in hopper
    assert "need megatron-snip installed" in printed(*EXPORT, "9.0", "--nearest")
    assert "  --fp4-format e2m1 --fp4-recipe nvfp4\n" in needs("10.0", "bf16-fp4-bf16", "bf16")


@pytest.mark.parametrize(
    ("flags", "recipe", "fields"),
    [
        (
            ("--fp8-recipe", "tensorwise", "--fp8-format", "hybrid"),
            "tensorwise_hybrid",
            {"fp8_quantization_recipe": "tensorwise", "fp8_format": "hybrid"},
        ),
        (("--fp8-recipe", "delayed"), "delayed", {"override_quantized_autocast": False}),
    ],
)
def test_fp8_is_the_recipe_of_the_run_that_the_file_is_for(
    folder: Path, printed: Any, flags: tuple[str, ...], recipe: str, fields: dict[str, Any]
) -> None:
    write_plan(plan_of(["fp8", "bf16", "fp8", "fp8"]), Path("plan.json"))
    text = printed(*EXPORT, "9.0", *flags)
    assert f"fp8: {recipe} (3 linears)" in text
    number_format = flags[-1] if len(flags) == 4 else "e4m3"
    needed = f"--fp8-format {number_format} --fp8-recipe {flags[1]}"
    assert f"  {needed}\n" in text and needed in Path("out.yaml").read_text()
    config = yaml.safe_load(Path("out.yaml").read_text())
    assert fields.items() <= config["configs"]["fp8"]["training_recipe"].items()


def test_a_format_of_fp8_needs_its_recipe(folder: Path, refused: Any) -> None:
    assert "--fp8-format needs --fp8-recipe" in refused(*EXPORT, "9.0", "--fp8-format", "hybrid")


def test_fp4_does_not_run_on_hopper(
    folder: Path, printed: Any, refused: Any, imported: Any
) -> None:
    text = refused(*EXPORT, "9.0")
    reason = "NVFP4 GEMMs need a GPU of compute capability 10.x or 12.x"
    assert f"fp4 on compute capability 9.0: {reason}" in text and "--nearest" in text
    assert not Path("out.yaml").exists()
    text = printed(*EXPORT, "9.0", "--nearest")
    assert "warning: fp4 becomes fp8: fp4 on compute capability 9.0" in text
    assert imported("out.yaml") == ["fp8_blockwise", "fp8_blockwise", "bf16", "fp8_blockwise"]


FACTS = StageLayers(
    [[{}], [{f"decoder.layers.{i}": i for i in range(3)}], [{"decoder.layers.3": 0}]]
)
"""Of the layout `E|ttt|tL`."""
UNEVEN = ["fp8", "fp4", "bf16", "fp4"]


@pytest.fixture
def uneven(folder: Path) -> Path:
    """A plan and a problem of a run whose stages have no, three and one layer."""
    write_plan(plan_of(UNEVEN, stages=(1.0, 0.5, 1.0), stage_layers=FACTS), Path("plan.json"))
    problem = problem_of([[0.0, 1.0]] * 4, stages=[1, 1, 1, 2])
    write_problem(problem.model_copy(update={"stage_layers": FACTS}), Path("problem.json"))
    return folder


STAGES = [f"out.stage{stage}.yaml" for stage in range(3)]


def test_stages_have_files_of_their_own(uneven: Path, printed: Any, imported: Any) -> None:
    """Global names would match other layers in each stage of such a job."""
    text = printed(*EXPORT, "10.0")
    assert "wrote out.stage0.yaml: 0 matchers of no layers" in text
    assert "wrote out.stage1.yaml: 3 matchers of decoder.layers.0 to decoder.layers.2" in text
    assert "one file for each of 3 pipeline stages" in text
    assert "  --te-precision-config-file out.stage0.yaml  # of its stage" in text
    assert not Path("out.yaml").exists()
    last = yaml.safe_load(Path(STAGES[2]).read_text())
    (matcher,) = last["matchers"].values()
    assert (matcher["pattern"], matcher["config"]) == (name_of(0), "fp4")
    assert imported(*STAGES) == ["mxfp8", "nvfp4", "bf16", "nvfp4"]
    back = read_plan(Path("back.json"))
    assert back.stage_layers == FACTS
    assert imported(*STAGES[::-1]) == options_of(back)  # each says of which stage it is
    # A problem without these facts: the files have them.
    write_problem(problem_of([[0.0, 1.0]] * 4), Path("problem.json"))
    assert imported(*STAGES) == options_of(back)
    # A file for a job without stages, and a problem with them.
    write_problem(problem_of([[0.0, 1.0]] * 4, stages=[0, 0, 1, 1]), Path("problem.json"))
    printed(*EXPORT, "10.0", "--pipeline-stages", "1")
    assert imported("out.yaml") == options_of(back)


def test_layers_without_planned_linears_take_no_memory(folder: Path, printed: Any) -> None:
    """A list of all layers up to this one would not fit into any."""
    last = 999_999_999
    write_plan(plan_of({name_of(0): "fp8", name_of(last): "fp4"}), Path("plan.json"))
    printed(*EXPORT, "10.0")
    matchers = yaml.safe_load(Path("out.yaml").read_text())["matchers"]
    assert [row["pattern"] for row in matchers.values()] == [name_of(0), name_of(last)]
    printed(*EXPORT, "10.0", "--pipeline-stages", "2", "--chunk-layers", f"1,{last}")
    matchers = yaml.safe_load(Path("out.yaml").read_text())["matchers"]
    assert [row["pattern"] for row in matchers.values()] == [name_of(0), name_of(last - 1)]


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (STAGES[1:2], "'out.stage1.yaml' is of stage 1; the files of stages 0, 2 are missing"),
        (STAGES[:2], "the files of stages 2 are missing; give one file, or one for each"),
        ([*STAGES[:2], STAGES[1]], "'out.stage1.yaml' and 'out.stage1.yaml' are both of pipeline"),
        ([*STAGES[:2], "other.yaml"], "are not of one pipeline: their stage_layers differ"),
    ],
)
def test_files_that_are_not_all_stages_are_refused(
    uneven: Path, printed: Any, refused: Any, files: list[str], text: str
) -> None:
    printed(*EXPORT, "10.0")
    Path("other.yaml").write_text(WRITTEN_BY_HAND)
    words = ["--problem", "problem.json", "--output", "back.json"]
    assert text in refused("import", *files, *words)
    assert not Path("back.json").exists()


def test_a_stage_that_no_pipeline_has_is_one_short_line(folder: Path, refused: Any) -> None:
    Path("out.yaml").write_text(f"pipeline_stage: {10**390}\nmatchers: {{}}\n")
    words = ["out.yaml", "--problem", "problem.json", "--output", "back.json"]
    text = refused("import", *words)
    assert "'out.yaml': pipeline_stage: must be less than or equal to 9999" in text
    assert len(text) < 300


def test_a_file_for_all_stages_says_of_which_layers(
    uneven: Path, printed: Any, imported: Any
) -> None:
    options = ["fp8", "fp4", "bf16", "fp8"]  # layers 0 and 3 have one local name
    write_plan(plan_of(options, stages=(1.0, 0.5, 1.0), stage_layers=FACTS), Path("plan.json"))
    printed(*EXPORT, "10.0")
    write_problem(problem_of([[0.0, 1.0]] * 4), Path("problem.json"))
    assert imported("out.yaml") == ["mxfp8", "nvfp4", "bf16", "mxfp8"]


def test_layers_of_stages_are_asked_for_where_they_are_not_known(
    folder: Path, printed: Any, refused: Any, imported: Any
) -> None:
    """A plan of version 2, one that was made by hand, or another number of stages."""
    asked = "2 pipeline stages holds is not known; give the number of layers of each model chunk"
    old = plan_of(UNEVEN, stages=(0.5, 0.5)).to_dict()
    del old["stage_layers"]
    Path("plan.json").write_text(json.dumps({**old, "version": 2}))
    assert asked in refused(*EXPORT, "10.0")
    assert "(together 4): --chunk-layers N,N,..." in refused(*EXPORT, "10.0")
    write_problem(problem_of([[0.0, 1.0]] * 4, stages=[0, 0, 0, 1]), Path("problem.json"))
    Path("hand.yaml").write_text(WRITTEN_BY_HAND)
    words = ["hand.yaml", "--problem", "problem.json", "--output", "back.json"]
    assert asked in refused("import", *words)
    printed(*EXPORT, "10.0", "--chunk-layers", "3,1")
    assert imported(*STAGES[:2]) == ["mxfp8", "nvfp4", "bf16", "nvfp4"]
    # Layer 3 is `decoder.layers.0` of the second stage, and layer 1 is `decoder.layers.1`.
    assert imported("hand.yaml", "--chunk-layers", "3,1") == ["bf16", "nvfp4", "nvfp4", "bf16"]
    more = "--chunk-layers gives 4 model chunks, and the number of pipeline stages known is 2"
    assert more in refused(*EXPORT, "10.0", "--chunk-layers", "1,1,1,1")
    # Interleaved: chunks 0 and 2 are the first stage's.
    words = ["--chunk-layers", "1,1,1,1", "--pipeline-stages", "2"]
    assert "both 'decoder.layers.0.mlp.linear_fc1' on" in refused(*EXPORT, "10.0", *words)


def test_multi_token_prediction_is_on_the_last_chunk_or_on_the_marked_one(
    folder: Path, printed: Any, refused: Any
) -> None:
    mtp = name_of(0, "transformer_layer.mlp.linear_fc1").replace("decoder", "mtp")
    options = {name_of(0): "fp8", name_of(1): "fp4", mtp: "fp4"}
    write_plan(plan_of(options), Path("plan.json"))

    def matchers(*words: str) -> list[list[str]]:
        printed(*EXPORT, "10.0", *words)
        paths = sorted(Path().glob("out.stage*.yaml"))
        return [list(yaml.safe_load(path.read_text())["matchers"]) for path in paths]

    two, four = ["--pipeline-stages", "2"], ["--pipeline-stages", "4"]
    assert matchers(*two, "--chunk-layers", "1,1") == [[name_of(0)], [name_of(1), mtp]]
    wanted = [[name_of(0)], [name_of(1)], [mtp], []]
    assert matchers(*four, "--chunk-layers", "1,1,0m,0") == wanted
    text = refused(*EXPORT, "10.0", *two, "--chunk-layers", "1m,1m")
    assert "all layers of multi-token prediction are in one chunk" in text
    encoder = {each.replace("mtp", "encoder"): option for each, option in options.items()}
    write_plan(plan_of(encoder), Path("plan.json"))
    text = refused(*EXPORT, "10.0", *two, "--chunk-layers", "1,1")
    assert "'encoder.layers.0': --chunk-layers counts layers of the decoder" in text
    printed(*EXPORT, "10.0")


def test_a_matcher_that_fits_no_linear_is_reported(folder: Path, printed: Any) -> None:
    text = WRITTEN_BY_HAND.replace('"*layers.0.*"', '"decoder.layers.7.*"')
    Path("hand.yaml").write_text(text)
    text = printed("import", "hand.yaml", "--problem", "problem.json", "--output", "back.json")
    assert "warning: 'hand.yaml': 1 of 2 matchers fit no linear of the problem: first" in text


def test_without_a_gpu_the_capability_is_asked_for(
    folder: Path, printed: Any, refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--capability 9.0" in refused(*EXPORT[:-1])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 3))
    printed(*EXPORT[:-1])
    assert "compute capability 10.3" in Path("out.yaml").read_text()


WRITTEN_BY_HAND = """
configs:
  high:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {}
  low:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {fp4_quantization_recipe: nvfp4, override_nonquantized_autocast: true}
    evaluation_recipe: {}
matchers:
  first: {type: glob, pattern: "*layers.0.*", config: high, enabled: true}
  rest: {type: glob, pattern: "*.mlp.*", config: low, enabled: true}
"""


def test_a_file_written_by_hand(folder: Path, printed: Any) -> None:
    Path("hand.yaml").write_text(WRITTEN_BY_HAND)
    text = printed("import", "hand.yaml", "--problem", "problem.json", "--output", "back.json")
    assert options_of(read_plan(Path("back.json"))) == ["bf16", "nvfp4", "nvfp4", "nvfp4"]
    assert "nvfp4: 3 linears" in text and "precision: 0.9000" in text
    assert "warning: evaluation recipes are left out" in text
    assert read_plan(Path("back.json")).stages == (pytest.approx(0.9),)


@pytest.mark.parametrize(
    ("update", "fault"),
    [
        ({"pins": (("*layers.1.*", "fp8"),)}, "has nvfp4, and pin *layers.1.* demands fp8"),
        ({"pins": (("*layers.3.*", "bf16"),)}, "has nvfp4, and pin *layers.3.* demands bf16"),
        ({"ties": ((name_of(0), name_of(1)),)}, "are tied and have different options"),
    ],
)
def test_a_file_that_breaks_a_rule_of_the_run_is_refused(
    folder: Path, refused: Any, update: dict[str, Any], fault: str
) -> None:
    Path("hand.yaml").write_text(WRITTEN_BY_HAND)
    problem = problem_of([[0.0, 1.0]] * 4).model_copy(update=update)
    write_problem(problem, Path("problem.json"))
    words = ("hand.yaml", "--problem", "problem.json", "--output", "back.json")
    text = refused("import", *words)
    assert "the file breaks rules of the problem's run: " in text and fault in text
    assert not Path("back.json").exists()


def test_a_file_with_a_forbidden_option_is_refused(folder: Path, refused: Any) -> None:
    Path("hand.yaml").write_text(WRITTEN_BY_HAND)
    costs = {"nvfp4": OptionCost(quality_loss=None, saving=0.0)}
    problem = problem_of([[0.0, 1.0]] * 4)
    problem = problem.with_options(lambda row: {**row.options, **costs})
    write_problem(problem, Path("problem.json"))
    words = ("hand.yaml", "--problem", "problem.json", "--output", "back.json")
    text = refused("import", *words)
    assert f"'{name_of(1)}' has 'nvfp4', which is forbidden" in text


def test_what_a_coming_run_decides_is_a_warning(folder: Path, printed: Any) -> None:
    Path("hand.yaml").write_text(WRITTEN_BY_HAND)
    problem = problem_of([[0.0, 1.0]] * 4).model_copy(update={"target": 0.9})
    write_problem(problem, Path("problem.json"))
    words = ("hand.yaml", "--problem", "problem.json", "--output", "back.json")
    text = printed("import", *words)
    assert "warning: the problem did not measure nvfp4: a run with this plan needs these" in text
    assert "warning: the share is below the problem's target of 0.9" in text


def test_an_option_that_one_linear_lacks_is_a_warning(folder: Path, printed: Any) -> None:
    Path("hand.yaml").write_text(WRITTEN_BY_HAND)
    costs = {"nvfp4": OptionCost(quality_loss=0.1, saving=1.0)}
    problem = problem_of([[0.0, 1.0]] * 4).with_options(
        lambda row: row.options if row.name == name_of(1) else {**row.options, **costs}
    )
    write_problem(problem, Path("problem.json"))
    words = ("hand.yaml", "--problem", "problem.json", "--output", "back.json")
    text = printed("import", *words)
    assert f"warning: the problem has no nvfp4 for {name_of(1)}: a run with this plan" in text
    assert "did not measure" not in text


EXPERTS = "mlp.experts.linear_fc1"
LAYERS = 12
"""So that the name of layer 1 begins as those of layers 10 and 11 do."""


def exported(to: str, module: str, options: list[str], *words: str) -> Any:
    """Export a plan of one linear in each layer."""
    plan = {name_of(layer, module): option for layer, option in enumerate(options)}
    write_plan(plan_of(plan), Path("plan.json"))
    assert main(["export", "plan.json", "--to", to, "--output", "out", *words]) == 0
    return yaml.safe_load(Path("out").read_text())  # JSON is YAML


TITAN = ("attention.qkv_linear.wq", "attention.wo", "feed_forward.w1", "feed_forward.w3")


def titan() -> torch.nn.Module:
    """A model with the names of torchtitan's Llama 3, as large as its 8B, without storage."""

    def linear() -> torch.nn.Module:
        return torch.nn.Linear(4096, 14336, device="meta")

    def layer() -> dict[str, Any]:
        attention = {"qkv_linear": {"wq": linear()}, "wo": linear()}
        return {"attention": attention, "feed_forward": {"w1": linear(), "w3": linear()}}

    def module(tree: Any) -> torch.nn.Module:
        is_tree = isinstance(tree, dict)
        return torch.nn.ModuleDict({k: module(v) for k, v in tree.items()}) if is_tree else tree

    return module({"layers": {str(i): layer() for i in range(LAYERS)}, "lm_head": linear()})


@pytest.mark.parametrize("module", ["self_attention.linear_qkv", "mlp.linear_fc1"])
def test_torchao_converts_the_linears_of_the_plan(folder: Path, module: str) -> None:
    float8 = pytest.importorskip("torchao.float8")
    utils = pytest.importorskip("torchao.float8.float8_linear_utils")
    ours = TITAN[:1] if "qkv" in module else TITAN[2:]
    options = [["bf16", "fp8", "fp4"][layer % 3] for layer in range(LAYERS)]
    lists = exported("torchtitan", module, options)
    plan = {f"layers.{i}.{m}": option for i, option in enumerate(options) for m in ours}
    config = float8.Float8LinearConfig(emulate=True)
    keep = utils._auto_filter_for_recipe("rowwise", **lists["float8"])
    model = float8.convert_to_float8_training(titan(), module_filter_fn=keep, config=config)
    low = {n for n, m in model.named_modules() if type(m).__name__ == "Float8Linear"}
    assert {n for n in low if n.split(".", 2)[-1] in ours} == {n for n in plan if plan[n] == "fp8"}
    assert "lm_head" not in low
    linears = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    low = {n for n in linears if any(entry in n for entry in lists["nvfp4"]["fqns"])}
    assert low == {n for n in plan if plan[n] == "fp4"}
    assert "mxfp8" not in lists  # an empty list would convert every linear


def test_modelopt_gets_the_precision_of_the_forward_pass(folder: Path) -> None:
    options = ["fp8", "nvfp4-fp8-bf16", "bf16", "mxfp8"]
    config = exported("modelopt", "self_attention.linear_proj", options)
    assert config["quantization"] == {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "quantized_layers": {
            "model.layers.0.self_attn.o_proj": {"quant_algo": "FP8"},
            "model.layers.1.self_attn.o_proj": {"quant_algo": "NVFP4", "group_size": 16},
            "model.layers.3.self_attn.o_proj": {"quant_algo": "MXFP8", "group_size": 32},
        },
    }


def test_yaml_is_the_plan(folder: Path) -> None:
    plan = {name_of(0): "fp8", name_of(1): "fp4-fp8-fp8"}
    assert exported("yaml", "mlp.linear_fc1", [*plan.values()]) == plan


@pytest.mark.parametrize("to", ["yaml", "te-precision"])
@pytest.mark.parametrize("policy", ["x\nevil: !!python/object/apply:os.getpid []\n#", "\x1b[2J"])
def test_a_policy_cannot_add_keys(to: str, policy: str, folder: Path, refused: Any) -> None:
    """A plan's digest leaves its policy out."""
    content = {**plan_of(["fp8"]).to_dict(), "policy": policy}
    Path("plan.json").write_text(json.dumps(content))
    assert "policy: " in refused(*EXPORT, "10.0", "--to", to)
    assert not Path("out.yaml").exists()


@pytest.mark.parametrize(
    ("to", "module", "option", "text"),
    [
        ("torchtitan", "mlp.linear_fc2", "fp4-fp8-fp8", "fp4-fp8-fp8 becomes fp8"),
        ("modelopt", "mlp.linear_fc2", "fp3", "fp3 becomes fp4"),
        ("modelopt", EXPERTS, "fp8", f"fp8 of decoder {EXPERTS} becomes bf16"),
    ],
)
def test_what_others_cannot_express_is_one_line(
    folder: Path, to: str, module: str, option: str, text: str, printed: Any, refused: Any
) -> None:
    write_plan(plan_of({name_of(0, module): option}), Path("plan.json"))
    words = ["export", "plan.json", "--to", to, "--output", "out"]
    assert f"{text}; give --nearest" in refused(*words)
    for unused in ("--capability 9.0", "--fp8-param"):
        flag = unused.split()[0]
        assert f"{flag} is for --to te-precision; leave it out" in refused(*words, *unused.split())
    assert f"{text}\nwrote out: 1 linears" in printed(*words, "--nearest")
