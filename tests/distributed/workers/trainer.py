"""What test_trainer.py runs on ranks: short trainings, several layouts in one process."""

from pathlib import Path
from typing import Any

from tests.distributed.workers.checkpoints import run_all


def run_layouts(layouts: dict[str, dict[str, Any]], folder: str) -> dict[str, Any]:
    """Train once a layout, without SNIP; return what each gave, by name."""
    runs = {
        name: {**values, "run_dir": Path(folder) / name, "snip": {"enabled": False}}
        for name, values in layouts.items()
    }
    results = run_all(runs)
    for result in results.values():
        for key in ("loss", "grad_norm"):
            name = "losses" if key == "loss" else "grad_norms"
            result[name] = [row[key] for row in result["metrics"]]
    return results
