"""What a run directory keeps when its run goes on from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_snip.trainer.resume import keep_steps_before


def test_later_steps_are_dropped_and_earlier_ones_kept(tmp_path: Path) -> None:
    for kind in ("plans", "problems", "divergences"):
        (tmp_path / kind).mkdir()
        for step in (2, 9, 10, 100):
            (tmp_path / kind / f"{step}.json").write_text("{}")
    rows = [json.dumps({"step": step, "loss": 1.0}) for step in range(12)]
    # A crashed machine may cut the last line.
    (tmp_path / "metrics.jsonl").write_text("\n".join([*rows, '{"step": 1']))
    keep_steps_before(tmp_path, 10)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == rows[:10]
    for kind in ("plans", "problems", "divergences"):
        assert sorted(p.name for p in (tmp_path / kind).iterdir()) == ["2.json", "9.json"]


def test_a_new_directory_is_left_as_it_is(tmp_path: Path) -> None:
    keep_steps_before(tmp_path / "absent", 5)
    assert not list(tmp_path.iterdir())


def test_what_a_crash_left_is_dropped_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "\u00b25.json").write_text("{}")  # digits, but no number
    good = [json.dumps({"step": step, "text": "\u2028 is no end of a line"}) for step in range(3)]
    spoilt = ['{"step": 1e999}', '{"step": NaN}', "[" * 10**5, "[1]", '{"step": -1}', '{"step": 5}']
    data = "\n".join([*good, *spoilt]).encode() + b'\n{"step": 1, "x": "\xff\xfe'
    (tmp_path / "metrics.jsonl").write_bytes(data)
    keep_steps_before(tmp_path, 5)
    kept = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    assert kept == "".join(f"{line}\n" for line in good)
    assert (tmp_path / "plans" / "\u00b25.json").exists()
