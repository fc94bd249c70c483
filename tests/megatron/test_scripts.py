"""Unmodified scripts of Megatron-LM, of releases and of its development branch, on two CPU ranks.

MEGATRON_MAIN is a clone of Megatron-LM; its branch (main) and the tags of releases are unpacked
from it. Hybrid models find the stand-ins of Transformer Engine and of Mamba's kernels. When all of
them have passed, the table of docs/backends.md is written.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import RANK_ENVIRONMENT, ROOT, free_port
from tests.megatron.fleet import Fleet
from tests.megatron.lab import CPU, MAMBA, MODEL, Lab, applied_plans, logged, saving

CLONE = os.environ.get("MEGATRON_MAIN")
RELEASES = {v: f"core_v{v}" for v in ("0.16.1", "0.17.1", "0.18.2", "0.19.0")} | {"main": "HEAD"}
SCRIPT = {
    "pretrain_gpt.py": [],
    "pretrain_hybrid.py": [
        *("--hybrid-override-pattern", "M*-M", *MAMBA, "--transformer-impl", "transformer_engine"),
        *("--spec", "megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"),
    ],
}
BEFORE_0_18 = {"hybrid": "mamba"}
CASES = [("pretrain_gpt.py", "tp2"), ("pretrain_gpt.py", "pp2"), ("pretrain_hybrid.py", "tp2")]
TRAINING = ["--mock-data", "--train-iters", "14", "--position-embedding-type", "rope"]
SNIP = ["--snip", "--snip-start-step", "11", "--snip-lag", "1", "--snip-interval", "100"]
SNIP += ["--snip-efficiency-target", "0.5", "--snip-backend", "simulate"]

pytestmark = pytest.mark.skipif(
    not CLONE, reason="MEGATRON_MAIN is not set: the scripts of a clone of Megatron-LM"
)


def git(*words: str) -> bytes:
    return subprocess.run(
        ["git", "-C", CLONE or "", *words], check=True, capture_output=True
    ).stdout


@pytest.fixture(scope="module")
def passed() -> Iterator[dict[tuple[str, str, str], str]]:
    """{(release, script, layout): version}; at the end it becomes the table."""
    found: dict[tuple[str, str, str], str] = {}
    yield found
    if len(found) == len(RELEASES) * len(CASES):
        page = ROOT / "docs" / "backends.md"
        begin, end = "<!-- releases -->\n", "<!-- end of releases -->"
        head, _, rest = page.read_text().partition(begin)
        page.write_text(head + begin + table(found) + end + rest.partition(end)[2])


def table(found: dict[tuple[str, str, str], str]) -> str:
    lines = ["| Megatron-LM | " + " | ".join(f"`{s}`, {layout}" for s, layout in CASES) + " |"]
    lines += ["| --- " * (1 + len(CASES)) + "|"]
    for release, ref in RELEASES.items():
        commit = git("log", "-1", "--format=%h of %cs", ref).decode().strip()
        names = [f"{release} ({commit})"] + [found[release, *case] for case in CASES]
        lines.append(f"| {' | '.join(names)} |")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module", params=RELEASES)
def release(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path, Lab]]:
    """A release, its checkout and runs whose ranks import Megatron from there."""
    if not git("tag", "-l", RELEASES[request.param]) and request.param != "main":
        pytest.skip(f"the clone has no tag {RELEASES[request.param]}")
    folder = tmp_path_factory.mktemp("megatron")
    archive = git("archive", RELEASES[request.param])
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive, check=True)
    fleet = Fleet(folder, ROOT / "tests" / "stand_ins")
    yield request.param, folder, Lab(fleet, folder)
    fleet.close()


@pytest.mark.parametrize(("script", "layout"), CASES)
def test_a_run_is_megatrons_own_until_its_first_plan(
    release: tuple[str, Path, Lab],
    passed: dict[tuple[str, str, str], str],
    script: str,
    layout: str,
) -> None:
    version, folder, lab = release
    path, flags = folder / script, [*TRAINING, *SCRIPT[script]]
    if not path.exists():
        path = folder / script.replace("hybrid", "mamba")
        flags = [flag.replace("hybrid_", "mamba_").replace(".hybrid", ".mamba") for flag in flags]
    plain = lab.run(layout, flags, plain=True, script=str(path))
    output = lab.output(f"snip-{path.stem}-{layout}")
    run = lab.run(layout, [*flags, *SNIP, "--snip-output-dir", str(output)], script=str(path))
    assert run.statuses == plain.statuses == (0, 0), plain.report + run.report
    assert applied_plans(run) == [12], run.report
    for what in ("lm loss", "grad norm"):
        before, after = logged(plain, what), logged(run, what)
        assert len(before) == 14 and [after[i] for i in range(1, 12)] == [*before.values()][:11]
    assert logged(run)[12] != logged(plain)[12]
    assert "was not tested with SNIP" not in run.logs[0]  # the range of versions is right
    passed[version, script, layout] = "passed"


TE_MISSING = "Transformer Engine cannot be imported; install it, or give --transformer-impl local"
MISTAKES = {
    "flag before the script": (["-m", "megatron_snip", "--snip", "SCRIPT"], "the order is"),
    "no -m": (["megatron_snip", "SCRIPT", "--snip"], "can't open file"),
    "script without SNIP": (["SCRIPT", *CPU.split(), "--snip"], "unrecognized arguments: --snip"),
    "no Transformer Engine": (
        ["-m", "megatron_snip", "--cpu", "SCRIPT", "--transformer-impl", "transformer_engine"],
        TE_MISSING,
    ),
}


@pytest.mark.parametrize("release", ["main"], indirect=True)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_first_mistake_under_the_real_script(
    release: tuple[str, Path, Lab], mistake: str, tmp_path: Path
) -> None:
    """The last line of one rank names it; without -m no code of this package runs."""
    _, folder, _ = release
    words, message = MISTAKES[mistake]
    script = str(folder / "pretrain_gpt.py")
    words = [script if word == "SCRIPT" else word for word in words]
    if "--cpu" in words:
        words += [*MODEL.split(), *TRAINING, *SNIP]
    environment = {**os.environ, **RANK_ENVIRONMENT, "PYTHONWARNINGS": "ignore"}
    environment |= {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert message in done.stderr.splitlines()[-1], done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("release", ["main"], indirect=True)
def test_a_checkpoint_of_another_version_under_the_real_script(
    release: tuple[str, Path, Lab],
) -> None:
    _, folder, lab = release
    path, save = str(folder / "pretrain_gpt.py"), lab.output("other-version")
    flags = [*TRAINING, *SNIP, "--ckpt-format", "torch"]
    saved = lab.run("one", [*flags, *saving(save, 14)], script=path)
    assert saved.statuses == (0,), saved.report
    (file,) = save.glob("iter_0000014/*/model_optim_rng.pt")
    state = torch.load(file, weights_only=False)
    state["snip"]["version"] = 9
    torch.save(state, file)
    again = ["--load", str(save), "--snip-output-dir", f"{save}-again"]
    run = lab.run("one", [*flags, *again], script=path)
    assert run.statuses == (2,), run.report
    (line,) = [x for x in run.logs[0].splitlines() if x.startswith("megatron-snip: error:")]
    assert "version 9; this megatron-snip reads version 2" in line
