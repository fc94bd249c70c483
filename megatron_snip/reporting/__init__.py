"""Where a run's decisions and measurements go: files, W&B, tables. Reads records only."""
