"""The command line: one file per subcommand, each with `add_arguments` and `run`."""
