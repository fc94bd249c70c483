"""Pictures of a run, drawn with matplotlib: for the report, for W&B and TensorBoard, for the docs.

One function a picture; it takes a canvas (width, light or dark) and records, and returns a figure.
`canvas.py` says why matplotlib.
"""
