"""The report of runs: one HTML file that needs nothing else, and a PNG of each of its pictures."""
