"""Trackers of runs for `RunConfig(trackers=[...])`, and what one of your own needs."""

from typing import TYPE_CHECKING

from estimator.core._record import Histogram
from estimator.integrations._csv import CsvTracker
from estimator.integrations._mlflow import MLflowTracker
from estimator.integrations._wandb import WandbTracker
from estimator.porting._missing_names import names_missing_in as _names_missing_in
from estimator.summary._trackers import Run, Tracker, Writer

__all__ = ["CsvTracker", "Histogram", "MLflowTracker", "Run", "Tracker", "WandbTracker", "Writer"]

if not TYPE_CHECKING:  # which would take any name for an attribute
    __getattr__ = _names_missing_in(__name__)
