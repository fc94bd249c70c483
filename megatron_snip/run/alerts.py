"""Alerts: linears whose measures of health are beyond a threshold of `--snip-alert`."""

from collections.abc import Sequence

from megatron_snip.alert_thresholds import AlertThreshold
from megatron_snip.errors import listing
from megatron_snip.statistics.health_table import HealthTable

Alerted = tuple[tuple[str, str], ...]
"""(text of a threshold, linear) that were reported, sorted."""


class Alerts:
    """Reports each linear once for each threshold, and not again after a resume."""

    def __init__(self, thresholds: Sequence[AlertThreshold]) -> None:
        """Start with nothing reported."""
        self._thresholds = tuple(thresholds)
        self._reported: Alerted = ()

    def report(self, health: HealthTable) -> str | None:
        """Return one line about the linears that are beyond a threshold for the first time.

        It names six linears for each threshold; health/<iteration>.json has all. All thresholds
        share a line: W&B drops a second alert with the same title within a minute.
        """
        texts = []
        for threshold in self._thresholds:
            text = threshold.text
            beyond = health.beyond(threshold.measure, threshold.sign, threshold.limit)
            new = [found for found in beyond if (text, found.linear) not in self._reported]
            if new:
                now = {(text, found.linear) for found in new}
                self._reported = tuple(sorted(now.union(self._reported)))
                texts.append(f"alert {text}: {listing(list(map(str, new)))}")
        return "; ".join(texts) or None

    def state_dict(self) -> Alerted:
        """Return what was reported."""
        return self._reported

    def load_state_dict(self, state: Alerted) -> None:
        """Do not repeat what a stopped run reported."""
        self._reported = tuple(sorted(state))
