"""Writers for MLflow and Comet, whose runs Megatron-Bridge starts (`logger.mlflow_experiment`).

They get what W&B gets: the same scalars under the same names, settings, what linears run, pictures,
plans as files. Both show a failure as text only; alerts are rules that their users set on
`snip/1_guard_events` and `snip/refresh/failed`.
"""

import json
import time
from typing import Any

from megatron_snip.reporting.events import Notice, Payload, PlanApplied
from megatron_snip.reporting.writers import Dashboard, pictures

_MAX_TAG = 5000
"""Characters of a tag's value that every MLflow server stores."""


class MlflowWriter(Dashboard):
    """Logs to the run that is active in the module `mlflow` when the writer is made.

    The run's identity is given with every call: what is active depends on the thread, and writers
    work in threads of their own. Settings are tags, `snip.<setting>`: a parameter of MLflow cannot
    change, and a run may follow other settings than it was started with.
    """

    def __init__(self, board: Any, *args: Any, **options: Any) -> None:
        """See `Dashboard`; `board` is the module `mlflow`."""
        self._run_id = board.active_run().info.run_id
        self._client = board.MlflowClient()
        super().__init__(board, *args, **options)

    def _show(self, name: str, values: dict[str, Any], iteration: int) -> None:
        file = f"snip/{name}.json" if name == "config" else f"snip/{name}/{iteration}.json"
        self._client.log_dict(self._run_id, values, file)
        if name == "config":
            tag = self._board.entities.RunTag
            texts = {f"snip.{key}": str(value)[:_MAX_TAG] for key, value in values.items()}
            self._client.log_batch(self._run_id, tags=[tag(*pair) for pair in texts.items()])

    def _log(self, iteration: int, payload: Payload, scalars: dict[str, float]) -> None:
        client = self._client
        now = int(1000 * time.time())  # milliseconds since 1970
        metric = self._board.entities.Metric
        metrics = [metric(name, value, now, iteration) for name, value in scalars.items()]
        client.log_batch(self._run_id, metrics=metrics)
        for name, picture in pictures(payload).items():
            client.log_figure(self._run_id, picture, f"{name}/{iteration}.png")
        if isinstance(payload, PlanApplied):
            plan = payload.plan
            client.log_dict(self._run_id, plan.to_dict(), f"snip/plans/{plan.iteration}.json")
        elif isinstance(payload, Notice):
            text = f"iteration {iteration}: {payload.kind}: {payload.message}"
            client.set_tag(self._run_id, "snip.notice", text[:_MAX_TAG])

    def close(self) -> None:
        """Leave the run to its maker."""


class CometWriter(Dashboard):
    """Logs to a `comet_ml.Experiment`, whose maker ends it. Settings are its parameters `snip_...`.

    The experiment's calls do not wait: it sends in a thread of its own.
    """

    def _show(self, name: str, values: dict[str, Any], iteration: int) -> None:
        if name == "config":
            self._board.log_parameters(values, prefix="snip")
        else:
            text = json.dumps(values, indent=1)
            self._board.log_asset_data(text, name=f"snip/{name}/{iteration}.json", step=iteration)

    def _log(self, iteration: int, payload: Payload, scalars: dict[str, float]) -> None:
        experiment = self._board
        experiment.log_metrics(scalars, step=iteration)
        for name, picture in pictures(payload).items():
            experiment.log_figure(figure_name=name, figure=picture, step=iteration)
        if isinstance(payload, PlanApplied):
            plan = payload.plan
            file = f"snip/plans/{plan.iteration}.json"
            experiment.log_asset_data(plan.to_json(), name=file, step=iteration)
        elif isinstance(payload, Notice):
            experiment.log_text(f"SNIP: {payload.kind}: {payload.message}", step=iteration)

    def close(self) -> None:
        """Leave the experiment to its maker."""
