"""The published models of configs/, and the files of parallel sizes that go with each."""

from tests.processes import ROOT

FOLDER = ROOT / "configs"

MODELS = {
    "tinyllama-1.1b": (32, 1, {"data": 8}),
    "open-llama-3b": (32, 1, {"data": 8}),
    "open-llama-7b": (32, 1, {"data": 8}),
    "llama-70b": (64, 1, {"llama-70b-8gpus": 8, "llama-70b-64gpus": 64}),
    "mixtral-8x7b": (32, 2, {"mixtral-8x7b-8gpus": 8}),
}
"""Heads of attention, active experts, and GPUs by file of parallel sizes."""
LAYOUTS = [(name, layout) for name, (*_, layouts) in MODELS.items() for layout in layouts]
