"""Stands in for Comet's client; what an experiment gets is also in a file of TINY_TRACKERS."""

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Experiment:
    def __init__(self, **settings: Any) -> None:
        self.metrics: dict[str, dict[int, float]] = {}
        self.parameters: dict[str, Any] = {}
        self.files: dict[str, Any] = {}
        self.texts: dict[int, str] = {}
        self.is_ended = False
        self._lock = threading.Lock()

    def set_name(self, name: str) -> None: ...

    def add_tags(self, tags: list[str]) -> None: ...

    def log_other(self, key: str, value: Any) -> None: ...

    def log_metrics(self, dic: dict[str, Any], prefix: str | None = None, step: Any = None) -> None:
        assert not self.is_ended
        for name, value in dic.items():
            known = self.metrics.get(name, {})
            self._add(self.metrics, {name: {**known, step: value}})

    def log_parameters(self, parameters: dict[str, Any], prefix: str | None = None) -> None:
        names = {name: name if prefix is None else f"{prefix}_{name}" for name in parameters}
        self._add(self.parameters, {names[name]: value for name, value in parameters.items()})

    def log_asset_data(self, data: str, name: str | None = None, step: int | None = None) -> None:
        self._add(self.files, {name: json.loads(data)})

    def log_figure(self, figure_name: str, figure: Any, step: int | None = None) -> None:
        self._add(self.files, {f"{figure_name}/{step}": list(map(float, figure.get_size_inches()))})

    def log_text(self, text: str, step: int) -> None:
        self._add(self.texts, {step: text})

    def end(self) -> None:
        self.is_ended = True

    def _add(self, where: dict[Any, Any], values: Mapping[Any, Any]) -> None:
        with self._lock:
            where.update(values)
            if "TINY_TRACKERS" in os.environ:
                shown = {key: each for key, each in vars(self).items() if key[0] != "_"}
                file = Path(os.environ["TINY_TRACKERS"]) / "comet.json"
                file.write_text(json.dumps(shown, default=str))
