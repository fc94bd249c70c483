"""Unmodified scripts of Megatron-LM, of releases and of its development branch, on two CPU ranks.

MEGATRON_MAIN is a clone of Megatron-LM; its branch (main) and the tags of releases are unpacked
from it. The newest release has no tag there: its wheel, which is installed, runs the scripts of the
last tag. All find Transformer Engine's own Python, and stand-ins of Mamba's kernels. When all of
them have passed, the table of docs/megatron.md is written.
"""

import importlib.metadata
import os
import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT
from tests.megatron.lab import MAMBA, Lab, applied_plans, logged

CLONE = os.environ.get("MEGATRON_MAIN")
RELEASES = {v: f"core_v{v}" for v in ("0.16.1", "0.17.1", "0.18.2", "0.19.0")}
RELEASES |= {"0.19.2": "core_v0.19.0", "main": "HEAD"}
"""Release -> where its scripts are."""
INSTALLED = "0.19.2"
SCRIPT = {
    "pretrain_gpt.py": [],
    "pretrain_hybrid.py": [
        *("--hybrid-override-pattern", "M*-M", *MAMBA, "--transformer-impl", "transformer_engine"),
        *("--spec", "megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"),
    ],
}
CASES = [
    *(("pretrain_gpt.py", layout) for layout in ("tp2", "pp2", "te tp2")),
    ("pretrain_hybrid.py", "tp2"),
]
COLUMNS = [
    *("`pretrain_gpt.py`, tp2", "`pretrain_gpt.py`, pp2"),
    "`pretrain_gpt.py` on Transformer Engine, tp2",
    "`pretrain_hybrid.py`, tp2",
]
TRAINING = ["--mock-data", "--train-iters", "14", "--position-embedding-type", "rope"]
SNIP = ["--snip", "--snip-start-step", "11", "--snip-lag", "1", "--snip-interval", "100"]
SNIP += ["--snip-efficiency-target", "0.5"]
SIMULATE = ["--snip-backend", "simulate"]

pytestmark = pytest.mark.skipif(
    not CLONE, reason="MEGATRON_MAIN is not set: the scripts of a clone of Megatron-LM"
)


def git(*words: str) -> bytes:
    return subprocess.run(
        ["git", "-C", CLONE or "", *words], check=True, capture_output=True
    ).stdout


@pytest.fixture(scope="module")
def passed() -> Iterator[set[tuple[str, str, str]]]:
    """(release, script, layout); when all are there they become the table."""
    found: set[tuple[str, str, str]] = set()
    yield found
    if len(found) == len(RELEASES) * len(CASES):
        page = ROOT / "docs" / "megatron.md"
        begin, end = "<!-- releases -->\n", "<!-- end of releases -->"
        head, _, rest = page.read_text().partition(begin)
        page.write_text(head + begin + table() + end + rest.partition(end)[2])


def table() -> str:
    lines = ["| Megatron-LM | " + " | ".join(COLUMNS) + " |"]
    lines += ["| --- " * (1 + len(CASES)) + "|"]
    for release, ref in RELEASES.items():
        commit = git("log", "-1", "--format=%h of %cs", ref).decode().strip()
        source = "its wheel, scripts of 0.19.0" if release == INSTALLED else commit
        names = [f"{release} ({source})"] + ["passed"] * len(CASES)
        lines.append(f"| {' | '.join(names)} |")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module", params=RELEASES)
def release(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path, Lab]]:
    """A release, its checkout and runs whose ranks import Megatron from there."""
    if not git("tag", "-l", RELEASES[request.param]) and request.param != "main":
        pytest.skip(f"the clone has no tag {RELEASES[request.param]}")
    is_installed = request.param == INSTALLED
    if is_installed and importlib.metadata.version("megatron-core") != INSTALLED:
        pytest.skip(f"megatron-core {INSTALLED} is not installed")
    folder = tmp_path_factory.mktemp("megatron")
    scripts = git("ls-tree", "--name-only", RELEASES[request.param]).decode().split()
    scripts = [name for name in scripts if name.endswith(".py")]
    archive = git("archive", RELEASES[request.param], *(scripts if is_installed else ()))
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive, check=True)
    with closing(Lab(folder, folder, ROOT / "tests" / "stand_ins", with_te=True)) as lab:
        yield request.param, folder, lab


@pytest.mark.parametrize(("script", "layout"), CASES)
def test_a_run_is_megatrons_own_until_its_first_plan(
    release: tuple[str, Path, Lab],
    passed: set[tuple[str, str, str]],
    script: str,
    layout: str,
) -> None:
    version, folder, lab = release
    path, flags = folder / script, [*TRAINING, *SCRIPT[script]]
    if not path.exists():
        path = folder / script.replace("hybrid", "mamba")
        flags = [flag.replace("hybrid_", "mamba_").replace(".hybrid", ".mamba") for flag in flags]
    snip = SNIP if layout.startswith("te") else [*SNIP, *SIMULATE]
    plain = lab.run(layout, flags, plain=True, script=str(path))
    run = lab.run(layout, [*flags, *snip], script=str(path))
    assert run.statuses == plain.statuses == (0, 0), plain.report + run.report
    assert applied_plans(run) == [12], run.report
    for what in ("lm loss", "grad norm"):
        before, after = logged(plain, what), logged(run, what)
        assert len(before) == 14 and [after[i] for i in range(1, 12)] == [*before.values()][:11]
    assert logged(run)[12] != logged(plain)[12]
    assert "was not tested with SNIP" not in run.logs[0]  # the range of versions is right
    passed.add((version, script, layout))


def storages(checkpoint: Path) -> dict[str, bytes]:
    """The bytes of all tensors of a job's checkpoint, by rank."""
    found = {}
    for file in sorted(checkpoint.glob("mp_rank_*/model_optim_rng.pt")):
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                if "/data/" in name:
                    found[f"{file.parent.name} {name}"] = archive.read(name)
    return found


def test_a_resumed_run_on_transformer_engine_is_bitwise_the_uninterrupted(
    release: tuple[str, Path, Lab],
) -> None:
    """Stopped under its first plan, which the checkpoint holds."""
    version, folder, lab = release
    if version not in ("0.16.1", INSTALLED):
        pytest.skip("the oldest release and the newest are enough")
    path = str(folder / "pretrain_gpt.py")
    flags = [*TRAINING, *SNIP, "--ckpt-format", "torch", "--save-interval", "100"]
    whole, stopped = lab.output("whole"), lab.output("stopped")
    uninterrupted = lab.run("te tp2", [*flags, "--save", str(whole)], script=path)
    first = [*flags, "--save", str(stopped), "--exit-interval", "12"]
    assert lab.run("te tp2", first, script=path).statuses == (0, 0)
    again = lab.run("te tp2", [*flags, "--save", str(stopped), "--load", str(stopped)], script=path)
    assert uninterrupted.statuses == again.statuses == (0, 0), uninterrupted.report + again.report
    assert sorted(logged(again)) == [13, 14]
    wanted = storages(whole / "iter_0000014")
    assert len(wanted) > 100 and storages(stopped / "iter_0000014") == wanted
