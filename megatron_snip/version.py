"""The one place that states the version; setup.py reads this file without importing it."""

__version__ = "0.1.0"
