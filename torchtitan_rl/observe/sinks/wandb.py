"""The Weights & Biases sink, online or offline. Offline runs are in `wandb/` of the run folder until `wandb sync`."""

import os
import sys
from typing import Any

from torchtitan_rl.errors import expect
from torchtitan_rl.observe.cell_text import flat_cell
from torchtitan_rl.observe.line_file import read_lines
from torchtitan_rl.observe.sample_rows import Row
from torchtitan_rl.observe.select import is_shown
from torchtitan_rl.observe.sinks.base import PROJECT, Sink, SinkContext, StepRecord
from torchtitan_rl.observe.store import END_OF_BATCH, STORE_FILE
from torchtitan_rl.observe.tokens import TOKENS


class WandbSink(Sink):
    """Logs scalars, histograms and incremental tables over "step"; at the end also an immutable table of each.

    After a resume the final table begins with the earlier rows that were shown, as far as samples.jsonl has them.

    A new column starts a new incremental table, which includes the rows so far. `step` is a logged value, because W&B's
    own counter would drop the steps that a resumed run repeats.
    """

    requires = "wandb"

    @classmethod
    def check(cls) -> None:
        """Raises UserError without a login, unless the run is offline. Does not ask W&B."""
        import wandb

        if wandb.setup(wandb.Settings(silent=True)).settings.mode in ("offline", "disabled"):
            return
        remedy = "Call `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline, which writes to RUN/wandb."
        try:
            has_login = wandb.login(prompt=False, verify=False)
        except wandb.errors.AuthenticationError as error:
            has_login, remedy = False, f"{error} {remedy}"
        expect(has_login, "metrics.sinks", "wandb", "a login to W&B", remedy)

    def __init__(self, context: SinkContext) -> None:
        super().__init__(context)
        os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")  # it would advertise itself
        import wandb

        self._wandb = wandb
        config, theirs = context.config, os.environ
        mode = theirs.get("WANDB_MODE")
        quiet = mode == "offline" or not sys.stderr.isatty()
        self._run = wandb.init(
            project=config.project or theirs.get("WANDB_PROJECT") or PROJECT,
            name=theirs.get("WANDB_NAME") or context.run_name,
            id=context.run_id,
            resume="allow",
            mode=mode,
            dir=theirs.get("WANDB_DIR") or str(context.run_folder),
            config=context.run_config,
            # Its own metadata would have the command line, with the secrets of its options.
            settings=wandb.Settings(console="off", silent=quiet, x_disable_meta=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._tables: dict[str, Any] = {}
        self._history: dict[str, list[Row]] = {}
        self._earlier: dict[str, list[Row]] = {}

    def rewind(self, step: int) -> None:
        """Reads the rows that earlier sessions have shown before `step`."""
        for row in read_lines(self.context.run_folder / STORE_FILE, END_OF_BATCH):
            takes = self.context.takes(row["table"], row["step"])
            if row["step"] < step and is_shown(row) and takes:
                added = ("run_id", "table", TOKENS)
                cells = {name: cell for name, cell in row.items() if name not in added}
                self._earlier.setdefault(row["table"], []).append(cells)

    def write(self, record: StepRecord) -> None:
        logged: dict[str, Any] = {**record.values, "step": record.step}
        for key, values in record.distributions.items():
            logged[f"{key}/histogram"] = self._wandb.Histogram(values)
        for key, rows in record.tables.items():
            logged[key] = self._extended(key, rows)
        self._run.log(logged)

    def close(self) -> None:
        for key in self._earlier | self._history:
            rows = self._earlier.get(key, []) + self._history.get(key, [])
            self._run.log({f"{key}/final": self._table(rows, _columns(rows), "IMMUTABLE")})
        self._run.finish()

    def _extended(self, key: str, rows: list[Row]) -> Any:
        history = self._history.setdefault(key, [])
        history += rows
        table = self._tables.get(key)
        columns = _columns([dict.fromkeys(table.columns if table else ()), *rows])
        if table is None or columns != table.columns:
            self._tables[key] = self._table(history, columns, "INCREMENTAL")
        else:
            for cells in _cells(rows, columns):
                table.add_data(*cells)
        return self._tables[key]

    def _table(self, rows: list[Row], columns: list[str], log_mode: str) -> Any:
        options = {"allow_mixed_types": True, "log_mode": log_mode}
        return self._wandb.Table(columns=columns, data=_cells(rows, columns), **options)


def _columns(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row))


def _cells(rows: list[Row], columns: list[str]) -> list[list[Any]]:
    return [[flat_cell(row.get(column)) for column in columns] for row in rows]
