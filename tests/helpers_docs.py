"""What processes do that run the code of a page in docs/, as `helpers_cluster` starts them."""

import json

import jax
import numpy as np


def many_hosts(code, model_dir):
    scope = {"model_dir": model_dir, "images_like": np.zeros((1, 64), np.float32), "ids_like": np.zeros(1, np.int64)}
    exec(code, scope)
    ids = [int(prediction["id"]) for prediction in scope["predictions"]]
    print(json.dumps({"process": jax.process_index(), "metrics": scope["metrics"], "ids": ids}), flush=True)
