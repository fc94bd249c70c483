"""Nothing that is read can run code: no pickle, safe YAML, weights-only loads."""

import ast
import json
import pickle
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_snip.planning.plan import write_plan
from megatron_snip.planning.problem import read_problem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.solver_process import SolverProcess
from megatron_snip.reporting.metrics_file import MetricsWriter
from megatron_snip.reporting.run_directory import RunDirectory
from megatron_snip.reporting.run_record import read_run
from megatron_snip.run.state import RunState
from tests.hostile.documents import DIVERGENCES, METRICS, PLAN, PROBLEM, SNIP, fuzzed, survives
from tests.hostile.mutations import mutants
from tests.processes import ROOT

FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "os.system",
    "os.popen",
    "yaml.unsafe_load",
    "yaml.full_load",
    "dist.broadcast_object_list",
    "dist.all_gather_object",
    "dist.gather_object",
    "dist.scatter_object_list",
    "np.load",
    "numpy.load",
}


def sources() -> list[Path]:
    folders = ("megatron_snip", "kernels", "patches", "benchmarks", "launch")
    return sorted(f for folder in folders for f in (ROOT / folder).rglob("*.py"))


def offences(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        yield from (name for name in names if name.split(".")[0] in FORBIDDEN_MODULES)
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if called in FORBIDDEN_CALLS or keywords.get("shell") == "True":
            yield called
        if called == "torch.load" and keywords.get("weights_only") != "True":
            yield called
        if called == "yaml.load" and keywords.get("Loader") != "_UniqueKeys":
            yield called


def test_no_source_can_run_what_it_reads() -> None:
    files = sources()
    assert len(files) > 100
    found = {
        str(file.relative_to(ROOT)): list(offences(ast.parse(file.read_text(encoding="utf-8"))))
        for file in files
    }
    assert {file: names for file, names in found.items() if names} == {}


def test_the_search_finds() -> None:
    calls = "torch.load(f)", "yaml.load(f)", "subprocess.run('x', shell=True)", "eval(x)"
    for text in ("import pickle", *calls):
        assert list(offences(ast.parse(text))), text


class Watch:
    """Records what unpickles or runs code, while it is on; a hook of Python's cannot be removed."""

    def __init__(self) -> None:
        self.is_on = False
        self.found: list[tuple[str, str]] = []
        sys.addaudithook(self.see)

    def see(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.is_on or event not in ("pickle.find_class", "os.system", "marshal.loads"):
            return
        caller = sys._getframe(1).f_code.co_filename
        if event != "marshal.loads" or "importlib" not in caller:
            self.found.append((event, caller))


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


def run_directory(path: Path) -> Path:
    directory = RunDirectory(path)
    directory.start({"snip": SNIP})
    directory.close()
    MetricsWriter(path / "metrics.jsonl").append(METRICS)
    for name in FILES:
        if name.endswith("/0.json"):
            (path / name).parent.mkdir()
            (path / name).write_text(json.dumps(FILES[name]))
    return path


def test_nothing_is_unpickled_in_a_cycle(tmp_path: Path, watch: Watch) -> None:
    folder = run_directory(tmp_path / "run")
    watch.is_on = True
    try:
        problem = read_problem(folder / "problems" / "0.json")
        with closing(SolverProcess()) as solver:
            solver.submit(problem, PlanSettings())
            plan = solver.result(600.0)
        write_plan(plan, folder / "plans" / "0.json")
        run = read_run(folder)
        assert run.plan is not None
        torch.save(RunState(1, run.plan).to_dict(), folder / "state.pt")
        loaded = torch.load(folder / "state.pt", weights_only=True)
        assert RunState.from_dict(loaded).plan == plan
        assert watch.found == []
        pickle.loads(pickle.dumps(Path))
        assert [event for event, _ in watch.found] == ["pickle.find_class"]
    finally:
        watch.is_on = False


FILES = {
    "problems/0.json": PROBLEM.to_dict(),
    "divergences/0.json": DIVERGENCES,
    "plans/0.json": PLAN.to_dict(),
    "precision/0.json": {"linears": [{"name": "a", "backend": "simulate"}]},
    "metrics.jsonl": METRICS,
    "versions.json": {"python": "3.11"},
    "config.yaml": {"snip": SNIP, "train_iters": 10},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_directory(tmp_path_factory.mktemp("runs") / "run")


@pytest.mark.parametrize("name", FILES)
def test_a_run_directory_with_one_hostile_file(name: str, run: Path) -> None:
    path = run / name
    good = path.read_bytes()

    @fuzzed
    @given(content=mutants(FILES[name]))
    def one(content: bytes) -> None:
        path.write_bytes(content + b"\n")
        # Metrics also name other files, or are those of a run without iterations.
        survives(lambda: read_run(run), "" if name == "metrics.jsonl" else path.name)

    try:
        one()
    finally:
        path.write_bytes(good)
    assert read_run(run).metrics.last_iteration == 1


@fuzzed
@given(step=st.sampled_from(["../../evil", "/etc/passwd", "..", "0/../../x", -1, 1.5, True, [1]]))
def test_a_plan_outside_of_the_run_is_never_read(step: object, run: Path) -> None:
    log = run / "metrics.jsonl"
    good = log.read_bytes()
    try:
        log.write_text(json.dumps({**METRICS, "plan_iteration": step}) + "\n")
        assert survives(lambda: read_run(run)) is None
    finally:
        log.write_bytes(good)
