"""Make a saved view of SNIP's panels in a W&B project, the most important ones first.

    pip install wandb-workspaces
    python launch/wandb_workspace.py TEAM PROJECT

It prints the address of the view. Runs of the project need no change: the panels are those that
docs/watching.md lists.
"""

from __future__ import annotations

import sys

import wandb_workspaces.reports.v2 as reports
import wandb_workspaces.workspaces as workspaces

FORMATS = ("bf16", "fp8", "fp4")
OPERANDS = ("input", "weight", "grad_output")
PICTURES = frozenset({"snip/5_fragile_linears", "snip/6_plan", "snip/health/maps"})
SECTIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "SNIP: safe, how much, who suffers": (
        ("snip/1_loss", "lm loss"),
        ("snip/1_guard_events", "snip/refresh/failed"),
        ("snip/2_quality_loss_share",),
        ("snip/3_lowest_precision_share", "snip/refresh/target"),
        ("snip/4_refresh_overhead_percent",),
        ("snip/5_fragile_linears",),
        ("snip/6_plan",),
    ),
    "SNIP: plans": (
        tuple(f"snip/share/{name}" for name in FORMATS),
        ("snip/refresh/changed_linears",),
        ("snip/refresh/solve_s", "snip/refresh/wait_s", "snip/refresh/measure_s"),
        ("snip/eval/loss_increase", "snip/eval/loss_increase_error"),
    ),
    "SNIP: measurements": (
        ("snip/divergence/loss_total",),
        ("snip/divergence/weight_total",),
        ("snip/health/maps",),
        ("snip/health/gradient_noise/worst", "snip/health/gradient_noise/plan"),
        tuple(f"snip/health/sqnr_db/{operand}/worst" for operand in OPERANDS),
        tuple(f"snip/health/underflow/{operand}/worst" for operand in OPERANDS),
    ),
}
"""Section -> panels; a panel shows the series of these names, or one picture."""


def workspace(entity: str, project: str) -> workspaces.Workspace:
    """Return the view; `save()` sends it to W&B."""
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name="SNIP",
        sections=[
            workspaces.Section(name=name, panels=[panel(*keys) for keys in panels], is_open=True)
            for name, panels in SECTIONS.items()
        ],
    )


def panel(*keys: str) -> reports.LinePlot | reports.MediaBrowser:
    """Return a panel of pictures or of lines."""
    if PICTURES.issuperset(keys):
        return reports.MediaBrowser(media_keys=list(keys))
    return reports.LinePlot(title=keys[0], x="Step", y=list(keys))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("two arguments: the W&B team (or user) and the project")
    view = workspace(*sys.argv[1:])
    view.save()
    print(view.url)
