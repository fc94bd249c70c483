"""Benchmarks: one command each, JSON and a table, ratios measured within one run."""
