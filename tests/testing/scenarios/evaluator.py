"""An evaluator that can be stopped in an evaluation or an export, and what it has done."""

import os
import time

import estimator as est
from estimator.checkpoint._checkpoint import Checkpoint
from testing.estimators import make, refuse, times

EVAL = est.EvalSpec(times(2), steps=None)


class Calls(est.Exporter):
    """Notes the steps of the evaluation and of the checkpoint that it gets, and whether it is the last time."""

    name = "calls"

    def __init__(self, name="calls"):
        self.name, self.calls = name, []

    def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
        saved = int(Checkpoint(checkpoint_path).read("global_step"))
        self.calls.append((eval_result["global_step"], saved, is_the_final_export))
        assert export_path == os.path.join(estimator.model_dir, "export", self.name)
        return str(saved)


def spec_of(exporter):
    return est.EvalSpec(times(2), steps=None, exporters=exporter)


def evaluate(estimator, max_steps, eval_spec=EVAL):
    return est.train_and_evaluate(estimator, est.TrainSpec(refuse, max_steps), eval_spec, role="evaluator")


def evaluated(estimator, name=None):
    """The steps that were evaluated."""
    return list(est.read_eval_metrics(estimator.eval_dir(name)))


class BlockAt(est.Hook):
    """Notes each evaluation, and blocks in the one of a step."""

    def __init__(self, folder, step):
        self.folder, self.step = folder, step

    def after_create_state(self, context):
        note(self.folder, "evaluations", context.global_step)
        if context.global_step == self.step:
            block()


class BlockingExporter(Calls):
    """Notes each export, and blocks before the one of a step."""

    def __init__(self, folder, step):
        super().__init__()
        self.folder, self.step = folder, step

    def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
        if eval_result["global_step"] == self.step:
            block()
        note(self.folder, "exports", f"{eval_result['global_step']} {is_the_final_export}")
        return super().export(estimator, export_path, checkpoint_path, eval_result, is_the_final_export)


def note(folder, name, value):
    with open(os.path.join(folder, name), "a") as file:
        print(value, file=file)


def block():
    print("blocked", flush=True)
    time.sleep(60)


def run(model_dir, max_steps, stop, moment):
    """Evaluates; at the step `stop` it blocks, when it "evaluates" or "exports"."""
    hook = BlockAt(model_dir, stop if moment == "evaluates" else None)
    exporter = BlockingExporter(model_dir, stop if moment == "exports" else None)
    spec = est.EvalSpec(times(2), steps=None, hooks=[hook], exporters=exporter)
    metrics, exports = evaluate(make(model_dir), max_steps, spec)
    print("result", metrics["global_step"], exports, flush=True)
