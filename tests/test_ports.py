"""examples/ports: each of the programs computes the same on 4 towers as on 1, and the guide's table has its lines."""

import ast
import importlib.util
import io
import pathlib
import re
import tokenize

import jax
import numpy as np
import pytest

import estimator as est

ROOT = pathlib.Path(__file__).resolve().parents[1]
PORTS = ROOT / "examples" / "ports"
SMALL = {"batch_size": 16}
PROGRAMS = {  # smaller, and without dropout, which draws other numbers in each tower
    "bert_run_classifier": {"num_hidden_layers": 1, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "census_estimator": {"first_layer_size": 8, "num_layers": 2},
    "cifar10_estimator": {},
    "cifar10_train": {"filters": 4, "units": [16, 8], "log_frequency": 2, "train_size": 32, "num_epochs_per_decay": 1},
    "custom_estimator": {},
    "dcgan": {"filters": 4, "epsilon": 1e-3},  # a bias before a batch norm has a gradient of rounding errors alone
    "deepfm": {"dropout": [1, 1]},
    "din": {"dropout": [1, 1]},
    "flax_mnist": {},
    "lstm_crf_ema": {"dropout": 0.0},
    "nanogpt": {"n_layer": 1, "dropout": 0.0},
    "official_mnist": {"filters": 4, "dropout": 0.0},
    "official_resnet": {"num_filters": 4},
    "official_transformer": {"num_hidden_layers": 1}
    | dict.fromkeys(["layer_postprocess_dropout", "attention_dropout", "relu_dropout"], 0.0),
    "seq2seq": {"num_units": 8},
    "ssd": {"width": 2},
    "text_classification": {"dropout": 0.0},
    "text_classification lstm": {"model": "lstm"},
    "wide_deep": {"hidden_units": [8, 4]},
    "xdeepfm": {"hidden_units": [8, 4], "cross_layer_sizes": [4, 4]},
}


# A second step is another program, to be compiled twice; these show what only later steps do: momentum and moments
# that are corrected, moving averages, two optimizers in turn, rates and rows of tables that change.
STEPS = 3
SEVERAL_STEPS = {"bert_run_classifier", "cifar10_train", "dcgan", "lstm_crf_ema", "wide_deep"}
FILES = {program.split()[0] for program in PROGRAMS}


def load(program):
    name = program.split()[0]
    spec = importlib.util.spec_from_file_location(name, PORTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_port_is_run_here():
    assert {path.stem for path in PORTS.glob("*.py")} == FILES


@pytest.mark.slow
@pytest.mark.usefixtures("steps_alone")
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_port_trains_evaluates_predicts_and_exports_the_same_on_4_towers(program, tmp_path, monkeypatch):
    module = load(program)
    data = module.load_data()
    rows = 62 if program == "custom_estimator" else 64  # 4 towers: 16, 16, 16, 14; such programs hold a model twice
    monkeypatch.setattr(module, "load_data", lambda: jax.tree.map(lambda x: x[:rows], data))
    steps = STEPS if program in SEVERAL_STEPS else 1
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        one, four = (
            outcome(*module.main(towers=n, steps=steps, model_dir=tmp_path / str(n), **SMALL, **PROGRAMS[program]))
            for n in (1, 4)
        )
    assert jax.tree.structure(one) == jax.tree.structure(four)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(four), strict=True):
        what = jax.tree_util.keystr(path)
        if a.dtype.kind in "SU":  # the names of classes
            assert np.array_equal(a, b), what
        else:
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4, err_msg=what)


def outcome(classifier, metrics, predictions, served):
    variables = classifier.get_variable_value(classifier.get_variable_names())
    results = {"variables": variables, "metrics": metrics, "predictions": predictions, "served": served}
    return jax.tree.map(np.asarray, results)


@pytest.mark.slow
def test_bert_begins_with_the_values_of_a_checkpoint(tmp_path):
    module = load("bert_run_classifier")
    words = np.full((100, 32), 0.5, np.float32)
    np.savez(tmp_path / "bert.npz", **{"bert/embeddings/word_embeddings": words, "cls/predictions/output_bias": words})
    params = module.PARAMS | PROGRAMS["bert_run_classifier"] | {"init_checkpoint": tmp_path / "bert.npz"}
    features, labels = jax.tree.map(lambda x: x[:4], module.load_data()[0])
    with jax.numpy_dtype_promotion("standard"):
        state = est.transform(module.model_fn, params).init(jax.random.key(0), features, labels)
    np.testing.assert_array_equal(state.variables["bert/embeddings/word_embeddings"], words)


def code_lines(path):
    """The lines of code of the functions that make the model, and of the file's own that they call."""
    source = path.read_text(encoding="utf-8")
    defined = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own = "my_model", "build_estimator", "seq2seq"
    names = [name for name in defined if name.endswith("model_fn") or name in own]
    for name in names:  # which grows
        called = {node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)}
        names += [each for each in defined if each in called and each not in names]
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in no_code
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            code -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    within = [range(defined[name].lineno, defined[name].end_lineno + 1) for name in names]
    return sum(line in lines for lines in within for line in code)


def test_the_guides_table_has_the_lines_of_every_port():
    page = (ROOT / "docs" / "from_tf_estimator.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)\.py` \| .* \| \d+ \| (\d+) \| .* \|$", page, re.M)
    not_of_tensorflow = {"flax_mnist", "nanogpt"}
    assert dict(rows).keys() == FILES - not_of_tensorflow
    for program, lines in rows:
        assert code_lines(PORTS / f"{program}.py") == int(lines), program


def test_no_port_needs_a_module_of_its_own():
    imported = set()
    for program in FILES:
        for node in ast.walk(ast.parse((PORTS / f"{program}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
    libraries = {"estimator", "flax", "jax", "numpy", "optax", "replicate", "sklearn"}
    assert imported == libraries | {"argparse", "functools", "itertools", "os", "re", "tempfile", "time"}


OWN = {  # what a port may define by itself, because its original did
    "bert_run_classifier.adam_weight_decay": "BERT's own optimizer: AdamW of TensorFlow 1.12 corrects its moments",
    "nanogpt.configure_optimizers": "the original, a program of JAX, chains optax's",
}


def test_no_port_defines_an_optimizer_a_schedule_an_l2_loss_or_a_mask_of_its_own():
    trees = {program: ast.parse((PORTS / f"{program}.py").read_text(encoding="utf-8")) for program in FILES}
    found = {f"{program}.{name}" for program, tree in trees.items() for name in own_pieces(tree)}
    assert found == OWN.keys()


PIECES = {
    "an optimizer": "def f(rate):\n return optax.chain(optax.clip(1.0), optax.sgd(rate))",
    "a transformation": "def f(rate):\n by_name = optax.GradientTransformation(init, update)\n return by_name",
    "a schedule of optax": "def f(p):\n rate = optax.piecewise_constant_schedule(p, {3: 0.1})\n return rate",
    "a schedule": "def f(p):\n def rate(step):\n  return p / step\n return rate",
    "a lambda": "f = lambda step: 0.1 / step",
    "an l2 loss": "def f(v):\n return jnp.sum(v**2) / 2",
    "an l2 loss of numbers times a half": "def f(v):\n return 0.5 * jnp.sum(jnp.square(v))",
    "an l2 loss as a method": "def f(v):\n return 1e-4 * (v**2).sum() / 2",
    "a mask": "def f(x, n):\n return (jnp.arange(x.shape[1]) < n[:, None]).astype('float32')",
    "a name": "def _l2_loss(v):\n return v",
}


@pytest.mark.parametrize("piece", PIECES)
def test_a_piece_of_its_own_is_seen(piece):
    assert own_pieces(ast.parse(PIECES[piece]))


def test_uses_of_the_librarys_pieces_are_none_of_its_own():
    used = """
def model_fn(features, labels, mode, params):
    lr = est.train.exponential_decay(0.1, est.global_step(), 10, 0.5)
    loss = 1e-4 * est.nn.l2_loss(w) + est.nn.sequence_mask(n, 3).sum() / 2
    return TowerOptimizer(est.train.AdamOptimizer(lr)).minimize(loss)
def load_data():
    return np.arange(3) < lengths[:, None]
"""
    assert not own_pieces(ast.parse(used))


HALF, SQUARES = r"(/ 2\b|\b0\.5 \*)", r"(sum\(([\w.]+ \*\* 2|jnp\.square\(.*\))\)|\*\* 2\)\.sum\(\))"
OWN_PIECE = re.compile(
    r"return optax\.|(\w+) = optax\.(?s:.*?)return \1\b"  # an optimizer or a schedule of optax's parts
    r"|(def \w+\(|lambda )(step|count|global_step)\)?:"  # a function of the step alone
    rf"|^(?=.*{HALF}).*{SQUARES}"  # half a sum of squares
    r"|jnp\.arange\(.*\) [<>=]",
    re.M,
)


def own_pieces(tree):
    """The outermost functions of a program that define what `est.train` and `est.nn` have."""
    there = {*est.nn.__all__, *est.train.__all__}
    texts = [(getattr(each, "name", ""), ast.unparse(each)) for each in tree.body]
    return [name or text for name, text in texts if name.strip("_") in there or OWN_PIECE.search(text)]
