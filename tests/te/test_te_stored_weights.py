"""Weights that the job stores quantized: what runs the job's own option, BF16, or other options."""

import weakref
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_snip.config import SnipConfig
from megatron_snip.linears.availability import available_options
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.te import stored_weight
from megatron_snip.options import Option
from megatron_snip.quantizers.stored import high_precision, is_quantized
from megatron_snip.run.controller import SnipController
from megatron_snip.statistics.health_table import HealthTable
from megatron_snip.statistics.observer import StepObserver
from megatron_snip.statistics.sample import MeasureSettings
from megatron_snip.topology import Topology
from megatron_snip.types import Operand
from tests.models import EXPERTS, assignment, build, losses, planned, resolved, training

MXFP8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}
JOBS: dict[str, dict[str, Any]] = {
    "mxfp8": MXFP8,
    "tensorwise_hybrid": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "nvfp4": {"fp4": "e2m1", "fp4_recipe": "nvfp4"},
}
BF16 = {"bf16": True, "params_dtype": torch.bfloat16}


def job(recipe: str, stored: bool = True, **changes: Any) -> Any:
    settings = JOBS[recipe]
    param = {"fp4_param" if "fp4" in settings else "fp8_param": stored}
    # Transformer Engine's attention wants num_query_groups.
    return build(ffn_hidden_size=128, num_query_groups=2, **BF16, **settings, **param, **changes)


def dequantized(model: Any) -> Any:
    """A BF16 run with the weights that `model` stores."""
    grouped = any(".experts." in name for name, _ in model.named_parameters())
    changes = {**EXPERTS, "moe_ffn_hidden_size": 128} if grouped else {}
    twin = build(ffn_hidden_size=128, num_query_groups=2, grouped=grouped, **BF16, **changes)
    values = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(high_precision(values[name]))
    return twin


def step(model: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(3)  # NVFP4 rounds gradients at random
    found = losses(model)
    return found, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def equal(one: Any, other: Any) -> bool:
    same = one[0] == other[0] and set(one[1]) == set(other[1])
    return same and all(torch.equal(grad, other[1][name]) for name, grad in one[1].items())


def untouched(model: Any, **settings: Any) -> PlannedModel:
    """A model under SNIP, before any plan."""
    under = PlannedModel([model], Topology(), seed=7, **settings)
    under.install()
    return under


def losses_of(run: SnipController, model: Any, iteration: int) -> Any:
    """One iteration through the controller, as `step` runs one without it."""
    torch.manual_seed(3)
    given = training(model)
    results = run.forward_backward(iteration, given.function, **given.kwargs)
    found = [float(next(iter(result.values()))) for result in results]
    return found, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def option_of(recipe: str) -> str:
    return "fp4" if recipe == "nvfp4" else "fp8"


@pytest.mark.parametrize("recipe", list(JOBS))
def test_the_job_s_own_option_leaves_modules_untouched(recipe: str) -> None:
    truth = step(job(recipe))
    model = job(recipe)
    under = untouched(model)
    assert all(is_quantized(weight) for linear in under.linears for weight in linear.weights)
    assert {str(linear.option) for linear in under.linears} == {option_of(recipe)}
    assert {linear.recipe for linear in under.linears} == {recipe}
    assert equal(step(model), truth)
    with under.runtime.running_in_bf16():
        assert step(model)[0] != truth[0]
    model.zero_grad()
    assert equal(step(model), truth)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("recipe", list(JOBS))
def test_bf16_multiplies_the_dequantized_weights(recipe: str, grouped: bool) -> None:
    changes = {**EXPERTS, "moe_ffn_hidden_size": 128} if grouped else {}
    model = job(recipe, grouped=grouped, **changes)
    under = planned(model)
    assert {linear.recipe for linear in under.linears} == {"bf16"}
    twin = dequantized(model)
    untouched(twin)
    # Attention and router run in the job's autocast in one of them, but without linears.
    assert equal(step(model), step(twin))


def test_a_gradient_is_fused_into_the_parameter_s_main_grad() -> None:
    model = job("mxfp8")
    planned(model)
    truth = step(model)[1]
    model = job("mxfp8")
    linears = planned(model).linears
    for linear in linears:
        linear.module.fuse_wgrad_accumulation = True
        (weight,) = linear.weights
        weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32)
        weight.grad_added_to_main_grad = False
    step(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for linear in linears:
        (weight,) = linear.weights
        assert weight.grad_added_to_main_grad is True
        unfused = truth[names[id(weight)]].float()  # each microbatch's is rounded to BF16
        assert torch.norm(weight.main_grad - unfused) <= 1e-2 * torch.norm(unfused)


def test_a_format_is_kept_when_the_dequantized_weight_is_rounded_again() -> None:
    """`fp8-fp8-bf16` quantizes the weight in both GEMMs, to what was stored."""
    model = job("mxfp8")
    under = planned(model, "fp8-fp8-bf16")
    assert step(model)[0] == step(job("mxfp8"))[0]
    assert {linear.recipe for linear in under.linears} == {"custom(mxfp8, mxfp8, bf16)"}


def test_a_stored_weight_excludes_finer_and_coarser_formats_than_its_own() -> None:
    under = planned(job("mxfp8"))
    linear = under.linears[0]
    for option in ("fp8", "bf16", "bf16-fp8-bf16", "bf16-bf16-fp4"):
        assert linear.refusal(Option.parse(option)) is None, option
    for option in ("fp4", "fp4-bf16-bf16", "bf16-fp4-bf16"):
        refusal = linear.refusal(Option.parse(option))
        assert refusal == "weights are stored in mxfp8: fprop and dgrad run that or bf16", option


@pytest.mark.parametrize(("backend", "option"), [("te", "bf16"), ("simulate", "fp4")])
def test_delayed_weight_gradients_need_fused_accumulation(backend: str, option: str) -> None:
    """Else Transformer Engine gives them to a dequantized weight: the parameter gets none."""
    from transformer_engine.pytorch.module._common import WeightGradStore

    linear = planned(job("mxfp8"), backend=backend).linears[0]
    linear.module.wgrad_store = WeightGradStore(delay_wgrad_compute=True)
    linear.module.fuse_wgrad_accumulation = True
    assert linear.refusal(Option.parse(option)) is None
    linear.module.fuse_wgrad_accumulation = False
    refusal = linear.refusal(Option.parse(option))
    assert refusal is not None and "needs Megatron's gradient accumulation fusion" in refusal
    as_in_the_job = "fp8" if backend == "te" else "bf16"
    assert linear.refusal(Option.parse(as_in_the_job)) is None


def test_one_copy_for_linears_planned_otherwise_and_none_for_others() -> None:
    model = job("mxfp8")
    under = planned(model, lambda name: "bf16" if name.endswith("fc2") else "fp8")
    losses(model, num_microbatches=3)
    for linear in under.linears:
        assert linear.stored.num_copies == linear.name.endswith("fc2")
    before = {linear.name: linear.stored.value(0) for linear in under.linears}
    with torch.no_grad():
        for linear in under.linears:
            linear.weights[0].copy_(2 * before[linear.name])
    losses(model)
    for linear in under.linears:
        assert torch.equal(linear.stored.value(0), 2 * before[linear.name])
    under.apply(assignment(under, "fp8"))
    assert not any(linear.stored.num_copies for linear in under.linears)
    with under.runtime.running_in_bf16():
        losses(model)
    assert not any(linear.stored.num_copies for linear in under.linears)


class Buckets:
    """A group of Megatron's buckets that gathers BF16 weights in the memory of the gradients."""

    def __init__(self, weights: list[torch.nn.Parameter], exact: list[torch.Tensor]) -> None:
        self.ddp_config = SimpleNamespace(reuse_grad_buf_for_mxfp8_param_ag=True)
        sizes = [weight.numel() for weight in weights]
        ends = list(accumulate(sizes))
        ranges = {w: (end - n, end) for w, end, n in zip(weights, ends, sizes, strict=True)}
        self.exact = exact
        data = torch.zeros(ends[-1], dtype=torch.bfloat16)
        self.buckets = [SimpleNamespace(param_data=data, params=weights, param_to_index=ranges)]

    @torch.no_grad()
    def gather(self) -> None:
        (bucket,) = self.buckets
        for weight, value in zip(bucket.params, self.exact, strict=True):
            start, end = bucket.param_to_index[weight]
            bucket.param_data[start:end] = value.flatten()
        self._post_param_sync()

    def _post_param_sync(self) -> None:
        (bucket,) = self.buckets
        for weight in bucket.params:
            start, end = bucket.param_to_index[weight]
            weight.copy_(bucket.param_data[start:end].view(weight.shape))
        bucket.param_data.zero_()


def test_linears_planned_otherwise_multiply_the_exact_gathered_weights() -> None:
    """`--reuse-grad-buf-for-mxfp8-param-ag`: only their BF16 weights are saved."""
    model = job("mxfp8")
    names = [name for name, p in model.named_parameters() if is_quantized(p)]
    weights = [model.get_parameter(name) for name in names]
    exact = [torch.randn_like(high_precision(weight)) / 8 for weight in weights]
    group = Buckets(weights, exact)
    model.bucket_groups = [group]

    def choice(name: str) -> str:
        return {"1": "fp8", "2": "fp4"}.get(name[-1], "bf16")

    under = planned(model, choice)
    assert under.linears[0].refusal(Option.parse("fp4")) is None
    with torch.no_grad():
        group.gather()
    saved = {linear.name for linear in under.linears if linear.stored.num_copies}
    assert saved == {linear.name for linear in under.linears if choice(linear.name) != "fp8"}

    twin = job("mxfp8", stored=False)
    values = dict(zip(names, exact, strict=True))
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            source = values.get(name)
            parameter.copy_(model.get_parameter(name) if source is None else source)
    other = planned(twin, choice)
    assert {linear.recipe for linear in other.linears} == {"mxfp8", "nvfp4", "bf16"}
    assert equal(step(model), step(twin))
    under.uninstall()
    assert "_post_param_sync" not in group.__dict__
    assert not any(linear.stored.num_copies for linear in under.linears)


def measure(model: Any, under: PlannedModel) -> HealthTable:
    formats = under.measured_formats(("fp8", "fp4"))
    names = frozenset(linear.name for linear in under.job.linears)
    observer = StepObserver(MeasureSettings(formats, 1, 7, names), Topology())
    with under.runtime.observed_by(observer):
        losses(model)
    return observer.table(under.job.linears, 1.0, 3.0)[1]


@pytest.mark.parametrize("recipe", list(JOBS))
def test_a_measurement_reads_one_dequantized_weight_at_a_time(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def tracked(weight: torch.Tensor) -> torch.Tensor:
        assert not any(ref() is not None for ref in made)
        value = high_precision(weight)
        made.append(weakref.ref(value))
        return value

    monkeypatch.setattr(stored_weight, "high_precision", tracked)
    model = job(recipe)
    under = untouched(model)
    measure(model, under)
    assert len(made) == len(under.job.linears)  # once in an iteration of two microbatches


def test_a_measured_weight_has_lost_what_its_own_format_cannot_hold() -> None:
    model = job("mxfp8")
    health = measure(model, untouched(model))
    model = job("mxfp8", stored=False)
    truth = measure(model, untouched(model))
    for own, other in zip(health.linears, truth.linears, strict=True):
        exact, rounded = own.operands["fp8"], other.operands["fp8"]
        assert exact[Operand.WEIGHT].sqnr_db is None
        assert rounded[Operand.WEIGHT].sqnr_db < 50
        assert exact[Operand.INPUT].sqnr_db == pytest.approx(rounded[Operand.INPUT].sqnr_db, abs=1)
        assert own.operands["fp4"][Operand.WEIGHT].sqnr_db == pytest.approx(
            other.operands["fp4"][Operand.WEIGHT].sqnr_db, abs=1
        )


def test_simulated_gemms_multiply_the_dequantized_weights() -> None:
    model = job("mxfp8")
    under = planned(model, "fp4", backend="simulate")
    twin = dequantized(model)
    other = planned(twin, "fp4", backend="simulate")
    with under.runtime.training_pass(1), other.runtime.training_pass(1):
        assert equal(step(model), step(twin))


@pytest.mark.parametrize(
    ("recipe", "formats"),
    [("mxfp8", ("bf16", "fp8")), ("nvfp4", ("bf16", "fp4"))],
)
def test_auto_leaves_out_what_no_stored_weight_allows(
    recipe: str, formats: tuple[str, ...]
) -> None:
    model = job(recipe)
    assert resolved(model).formats == formats
    every = ("fp8", "fp4")
    assert resolved(model, collect_only=True).formats == every
    assert resolved(job(recipe, stored=False)).formats == every
    under = PlannedModel([model], Topology(), 7)
    _, available = available_options(SnipConfig(), under.job, under.refusals_of)
    assert [str(option) for option in available.options] == list(formats)
    assert not any(available.refusals[option] for option in available.options)


@pytest.mark.parametrize("collect_only", [True, False])
@pytest.mark.parametrize("recipe", list(JOBS))
def test_a_job_starts_as_it_does_without_snip(recipe: str, collect_only: bool) -> None:
    """With `--snip-collect-only` it stays so: bitwise, while it is measured."""
    truth = step(job(recipe))
    model = job(recipe)
    config = SnipConfig(collect_only=collect_only, start_step=1, interval=10)
    optimizer = torch.optim.SGD(model.parameters())
    run = SnipController(config, [model], optimizer, topology=Topology(), seed=7)
    assert set(map(str, run.plan.linears.values())) == {option_of(recipe)}
    found = losses_of(run, model, iteration=1)
    assert equal(found, truth)
    run.close()


def test_where_the_weight_of_fprop_is_freed_that_of_dgrad_is_read() -> None:
    """As in a backward under Megatron-FSDP, which gathers only that one."""
    weight = next(p for _, p in job("mxfp8").named_parameters() if is_quantized(p))
    complete = high_precision(weight)
    weight._columnwise_data.zero_()  # so that it shows which of the two is read
    assert high_precision(weight).equal(complete)
    rows = weight._rowwise_data
    num_bytes = rows.untyped_storage().size()
    saved = rows.clone()
    rows.untyped_storage().resize_(0)
    try:
        found = high_precision(weight)
    finally:
        rows.untyped_storage().resize_(num_bytes)
        rows.copy_(saved)
    assert weight._rowwise_data is rows
    assert not found.any()
    assert high_precision(weight).equal(complete)
