"""Flags made from a model: names, help, and what was given."""

import argparse

from megatron_snip.config import SnipConfig
from megatron_snip.flags import add_flags


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="x")
    add_flags(made, SnipConfig, "snip-", "snip_")
    return made


def test_every_field_is_a_flag_with_help() -> None:
    actions = {a.dest: a for a in parser()._actions}
    for name, field in SnipConfig.model_fields.items():
        action = actions[f"snip_{name}"]
        flag = "--snip" if name == "enabled" else "--snip-" + name.replace("_", "-")
        assert flag in action.option_strings
        assert field.description, f"{name} has no text under it"
        words = str(action.help).replace("%%", "%").split("[default:")[0].split()
        assert words == field.description.split()
        assert "[default: " in str(action.help)
