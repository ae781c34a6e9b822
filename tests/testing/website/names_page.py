"""Writes docs/tensorflow_names.md, from the table in estimator/porting/_tensorflow_names.py.

python tests/testing/website/names_page.py
"""

import itertools
import pathlib

from estimator.porting._tensorflow_names import NAMES

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "tensorflow_names.md"
HEAD = """# TensorFlow's names

TensorFlow 1.x names that are different here, or missing. Using one is an error that says the same: in modules, as
`est.SessionRunHook` and `est.layers.conv3d`, and on objects, as `estimator.export_savedmodel` and `config.task_type`.
`est.train` has the optimizers and schedules of `tf.train` and `tf.contrib.opt`, with their arguments and numbers.
Most other names of `tf.estimator`, `tf.train`, `tf.layers`, `tf.losses`, `tf.metrics`, `tf.summary` and
`tf.feature_column` are the same in `est`; operations (`tf.matmul`, `tf.nn.relu`) are in `jax.numpy`, `jax.nn`,
`optax`, or else in `est.nn` by TensorFlow's name (`est.nn.l2_loss`, `est.nn.in_top_k`).
[From TF Estimator](from_tf_estimator.md) ports a whole model line by line, and lists the lines that stay as they are.
"""


def section(key: str) -> str:
    parts = key.split(".")
    return ".".join(parts[: 3 if parts[1] == "contrib" else 2]) if len(parts) > 2 else "tf"


def page() -> str:
    """The text of the page."""
    lines = [HEAD]
    for name, keys in itertools.groupby(sorted(NAMES, key=lambda key: (section(key), key)), section):
        lines += [f"## {name}\n", "| TensorFlow 1.x | here |", "|---|---|"]
        lines += [f"| `{key}` | {NAMES[key]} |" for key in keys] + [""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
