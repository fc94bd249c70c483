"""Stands in for MLflow: one run at a time is active in each thread, as in MLflow itself.

What a run gets is in RUNS, and in a file if TINY_TRACKERS names a folder.
"""

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

RUNS: dict[str, dict[str, dict[str, Any]]] = {}
"""By the run's identity: `metrics` {name: {step: value}}, `tags`, `params` and `files`."""

_active = threading.local()
_lock = threading.Lock()


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class RunTag(NamedTuple):
    key: str
    value: str


entities = SimpleNamespace(Metric=Metric, RunTag=RunTag)


def active_run() -> Any:
    return getattr(_active, "run", None)


def start_run(**settings: Any) -> Any:
    assert active_run() is None, "a run is active"
    name = f"run-{len(RUNS)}"
    RUNS[name] = {"metrics": {}, "tags": {}, "params": {}, "files": {}}
    _active.run = SimpleNamespace(info=SimpleNamespace(run_id=name))
    return _active.run


def end_run(status: str = "FINISHED") -> None:
    _active.run = None


def set_tracking_uri(uri: str) -> None: ...


def set_experiment(name: str) -> None: ...


def set_tags(tags: dict[str, Any]) -> None:
    _add(_current(), "tags", tags)


def log_params(params: dict[str, Any]) -> None:
    known = RUNS[_current()]["params"]
    assert all(known.get(key, value) == value for key, value in params.items()), "it has a value"
    _add(_current(), "params", params)


def log_metrics(metrics: dict[str, Any], step: int) -> None:
    _add_metrics(_current(), {(name, step): value for name, value in metrics.items()})


def _current() -> str:
    run = active_run() or start_run()  # a thread without a run gets a new one
    return str(run.info.run_id)


class MlflowClient:
    def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        assert len(tags) <= 100 and len(metrics) <= 1000, "more than a server takes"
        _add_metrics(run_id, {(each.key, each.step): each.value for each in metrics})
        _add(run_id, "tags", dict(tags))

    def set_tag(self, run_id: str, key: str, value: Any) -> None:
        _add(run_id, "tags", {key: value})

    def log_dict(self, run_id: str, dictionary: Any, artifact_file: str) -> None:
        _add(run_id, "files", {artifact_file: json.loads(json.dumps(dictionary))})

    def log_figure(self, run_id: str, figure: Any, artifact_file: str) -> None:
        _add(run_id, "files", {artifact_file: [float(x) for x in figure.get_size_inches()]})


def _add_metrics(run_id: str, values: Mapping[tuple[str, int], Any]) -> None:
    with _lock:
        for (name, step), value in values.items():
            RUNS[run_id]["metrics"].setdefault(name, {})[step] = value
        _save()


def _add(run_id: str, kind: str, values: Mapping[str, Any]) -> None:
    with _lock:
        RUNS[run_id][kind].update(values)
        _save()


def _save() -> None:
    if "TINY_TRACKERS" in os.environ:
        file = Path(os.environ["TINY_TRACKERS"]) / "mlflow.json"
        file.write_text(json.dumps(RUNS, default=str))
