"""Policies trained against each other from the same checkpoints; see __main__.py."""
