"""What processes do that run the code of a page in docs/, as `testing.cluster` starts them."""

import json

import jax
import numpy as np


def many_hosts(code, model_dir):
    scope = {"model_dir": model_dir}
    exec(code, scope)
    ids = [int(prediction["id"]) for prediction in scope["predictions"]]
    print(json.dumps({"process": jax.process_index(), "metrics": scope["metrics"], "ids": ids}), flush=True)


def from_caffe2(lines, model_dir):
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    scope = {"x": np.float32(images / 16), "y": labels.astype(np.int32), "model_dir": model_dir}
    for line in lines:
        exec(line, scope)
    kernel = float(scope["together"].get_variable_value("hidden/kernel").sum())
    print(json.dumps({"process": jax.process_index(), "kernel": kernel, "total": scope["total"].tolist()}), flush=True)
