"""Alerts: linears whose measures of health are beyond a threshold of `--snip-alert`."""

from collections.abc import Sequence

from megatron_snip.alert_thresholds import AlertThreshold
from megatron_snip.errors import listing
from megatron_snip.statistics.health_table import HealthTable

Alerted = tuple[tuple[str, str], ...]
"""(text of a threshold, linear) that were reported, sorted."""


def new_alerts(
    thresholds: Sequence[AlertThreshold], health: HealthTable, reported: Alerted
) -> tuple[str | None, Alerted]:
    """Return one line about linears that are beyond a threshold for the first time.

    The line names six linears for each threshold; health/<iteration>.json has all. All thresholds
    share a line: W&B drops a second alert with the same title within a minute.

    Args:
        thresholds: of `--snip-alert`.
        health: what a refresh found.
        reported: what earlier lines were about.

    Returns:
        (the line, or None if there is nothing new; what is reported now).
    """
    texts = []
    now = set(reported)
    for threshold in thresholds:
        text = threshold.text
        beyond = health.beyond(threshold.measure, threshold.sign, threshold.limit)
        new = [found for found in beyond if (text, found.linear) not in now]
        if new:
            now.update((text, found.linear) for found in new)
            texts.append(f"alert {text}: {listing(list(map(str, new)))}")
    return "; ".join(texts) or None, tuple(sorted(now))
