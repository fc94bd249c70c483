"""The proof by experiment: the same training under every policy, run by run, and one table."""
