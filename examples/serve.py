"""Exports a model that reads handwritten digits, and serves it over HTTP on this machine.

    python examples/serve.py                             # trains, exports, serves, sends a few requests, ends
    python examples/serve.py --forever --port=8000       # keeps serving
    python examples/serve.py --exported=/tmp/digits/1700000000     # serves an existing export

    curl -d '{"pixels": [[0, 0, 0.3, ...]]}' http://127.0.0.1:8000      # 64 numbers for each image

The model is trained on several towers, and served on one device. The server is the standard library's; it uses only the
exported folder. It pads requests to a few batch sizes, each compiled once.
"""

import json
import logging
import statistics
import tempfile
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jax
import numpy as np
import optax
from absl import app, flags
from sklearn.datasets import load_digits

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

FLAGS = flags.FLAGS
flags.DEFINE_integer("towers", 2, "How many CPU devices to train on; GPUs are all used.", lower_bound=1)
flags.DEFINE_integer("steps", 500, "How many steps to train.", lower_bound=1)
flags.DEFINE_string("model_dir", None, "Where the checkpoints go; by default a temporary place.")
flags.DEFINE_string("exported", None, "The folder of an exported model to serve; by default one is trained.")
flags.DEFINE_integer("port", 0, "Where to listen on 127.0.0.1; 0 is any free port.")
flags.DEFINE_boolean("forever", False, "Whether to keep serving.")

MAX_BATCH = 256
NUM_TEST = 500


def model_fn(features, labels, mode):
    hidden = est.get_variable("hidden", (64, 64))
    bias = est.get_variable("bias", (64,), initializer=jax.nn.initializers.zeros)
    logits = jax.nn.relu(features["pixels"] @ hidden + bias) @ est.get_variable("out", (64, 10))
    digit = logits.argmax(-1)
    if mode == est.ModeKeys.PREDICT:
        predictions = {"digit": digit, "probability": jax.nn.softmax(logits).max(-1)}
        return est.EstimatorSpec(mode, predictions=predictions)
    loss = est.losses.sparse_softmax_cross_entropy(labels, logits)
    train_op = TowerOptimizer(optax.adam(3e-3)).minimize(loss)
    return est.EstimatorSpec(mode, loss=loss, train_op=train_op)


def train_and_export(pixels, labels):
    classifier = est.Estimator(replicate_model_fn(model_fn), FLAGS.model_dir)
    input_fn = est.inputs.numpy_input_fn({"pixels": pixels}, labels, 64, num_epochs=None, shuffle=True, seed=0)
    classifier.train(input_fn, steps=FLAGS.steps)
    return classifier.export_model(tempfile.mkdtemp(), {"pixels": pixels})


def make_handler(model):
    (expected,) = model.features.values()

    def answer(request):
        pixels = np.asarray(json.loads(request)["pixels"], expected.dtype)
        if not 0 < len(pixels) <= MAX_BATCH:
            raise ValueError(f"Send between 1 and {MAX_BATCH} images; got {len(pixels)}.")
        padding = (1 << (len(pixels) - 1).bit_length()) - len(pixels)  # up to a power of two
        outputs = model({"pixels": np.pad(pixels, [(0, padding), *[(0, 0)] * (pixels.ndim - 1)])})
        return {name: value[: len(pixels)].tolist() for name, value in outputs.items()}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            try:
                status, result = 200, answer(self.rfile.read(int(self.headers["Content-Length"])))
            except (KeyError, TypeError, ValueError) as e:  # errors of the request
                status, result = 400, {"error": str(e)}
            body = json.dumps(result).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            del args  # no line for each request

    return Handler


def ask(url, pixels):
    request = urllib.request.Request(url, json.dumps({"pixels": pixels}).encode())
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def try_out(url, pixels, labels):
    """Prints answers, and their times once the batch size is compiled."""
    result = ask(url, pixels[:8].tolist())
    print(f"Read as {result['digit']} where {labels[:8].tolist()} is right.")
    result = ask(url, pixels[:MAX_BATCH].tolist())
    print(f"Of {MAX_BATCH} images, {np.mean(result['digit'] == labels[:MAX_BATCH]):.1%} are read right.")
    for images in (1, 8, 64):
        seconds = []
        for _ in range(21):
            start = time.perf_counter()
            ask(url, pixels[:images].tolist())
            seconds.append(time.perf_counter() - start)
        print(f"{images:3} images per request: {1e3 * statistics.median(seconds[1:]):.1f} ms")
    try:
        ask(url, [[1.0, 2.0]])
    except urllib.error.HTTPError as e:
        print(f"Two numbers are not an image: {e.code}, {json.load(e)['error']}")


def main(argv):
    del argv
    jax.config.update("jax_num_cpu_devices", FLAGS.towers)
    logging.getLogger("jax").setLevel(logging.WARNING)  # it logs the backends that are missing
    images, labels = load_digits(return_X_y=True)
    pixels, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    path = FLAGS.exported or train_and_export(pixels[NUM_TEST:], labels[NUM_TEST:])
    model = est.load_exported(path)
    server = ThreadingHTTPServer(("127.0.0.1", FLAGS.port), make_handler(model))
    url = f"http://127.0.0.1:{server.server_port}"
    print(f"\nServing step {model.metadata['global_step']} of {model.path} at {url}\n", flush=True)
    if FLAGS.forever:
        server.serve_forever()
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try_out(url, pixels, labels)
        server.shutdown()


if __name__ == "__main__":
    app.run(main)
