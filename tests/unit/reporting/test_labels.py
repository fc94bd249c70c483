"""Labels fit, and keep what tells names apart."""

from megatron_snip.reporting.labels import MOST, label_of


def test_short_names_stay_and_long_ones_keep_both_ends() -> None:
    assert label_of("a" * MOST) == "a" * MOST
    label = label_of("seed-1-" + "x" * 300 + "-lr-0.1")
    assert len(label) == MOST and label.startswith("seed-1-") and label.endswith("-lr-0.1")
