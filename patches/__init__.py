"""The seams between SNIP and Megatron: one a file, off unless asked for, reversible."""
