"""The command line: one subcommand a file, each with `add_parser` and `run`."""
