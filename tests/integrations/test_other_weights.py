"""Weights of other libraries: a small encoder in the layout of Hugging Face's BERT, in files of its formats."""

import functools
import re
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import estimator as est
from estimator.layers import dense, layer_norm

WIDTH, VOCABULARY = 4, 6
RNG = np.random.default_rng(0)


def weight(*shape):
    return RNG.normal(size=shape).astype(np.float32)


# Outputs first, as in torch.nn.Linear; names as in BertModel.state_dict().
BERT = {
    "embeddings.word_embeddings.weight": weight(VOCABULARY, WIDTH),
    "embeddings.LayerNorm.weight": weight(WIDTH),
    "embeddings.LayerNorm.bias": weight(WIDTH),
    "encoder.layer.0.attention.self.query.weight": weight(3, WIDTH),
    "encoder.layer.0.attention.self.query.bias": weight(3),
    "encoder.layer.0.intermediate.dense.weight": weight(8, 3),
    "encoder.layer.0.intermediate.dense.bias": weight(8),
    "pooler.dense.weight": weight(WIDTH, WIDTH),
}
KINDS = {"kernel": "weight", "gamma": "weight", "beta": "bias", "bias": "bias", "embeddings": "weight"}


def model_fn(features, labels, mode):
    with est.variable_scope("bert"):
        with est.variable_scope("embeddings"):
            x = est.layers.embed(features, VOCABULARY, WIDTH, scope="word_embeddings")
            x = layer_norm(x, scope="LayerNorm", begin_norm_axis=-1)
        with est.variable_scope("encoder/layer/0"):
            x = dense(x, 3, name="attention/self/query")
            x = dense(x, 8, jax.nn.gelu, name="intermediate/dense")
    logits = dense(x[:, 0], 2, name="classifier")
    loss = None if mode == est.ModeKeys.PREDICT else est.losses.sparse_softmax_cross_entropy(labels, logits)
    train_op = None if loss is None else est.Optimizer(optax.sgd(0.1)).minimize(loss)
    return est.EstimatorSpec(mode, predictions={"hidden": x}, loss=loss, train_op=train_op)


def old_name(name):
    """The name in the file of a variable of `model_fn`."""
    *scope, kind = name.removeprefix("bert/").split("/")
    there = ".".join([*scope, KINDS[kind]])
    return est.Transpose(there) if kind == "kernel" else there


def warm(path, names=old_name, variables="bert/"):
    return est.Estimator(model_fn, warm_start_from=est.WarmStartSettings(str(path), variables, names))


IDS = np.array([[1, 3], [5, 0]], np.int32)


def predict(estimator):
    return next(iter(estimator.predict(lambda: IDS, yield_single_examples=False)))["hidden"]


def by_hand(weights):
    x = weights["embeddings.word_embeddings.weight"][IDS]
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
    x = x * weights["embeddings.LayerNorm.weight"] + weights["embeddings.LayerNorm.bias"]
    layer = "encoder.layer.0"
    for name in (f"{layer}.attention.self.query", f"{layer}.intermediate.dense"):
        x = x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
    return np.asarray(jax.nn.gelu(x))


def save_safetensors(weights, path):
    pytest.importorskip("safetensors.numpy").save_file(weights, path)


def save_torch(weights, path):
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(value) for name, value in weights.items()}
    torch.save({"state_dict": {"bert": tensors}, "epoch": 3}, path)


@pytest.mark.slow
@pytest.mark.parametrize("save, ending", [(save_safetensors, "safetensors"), (save_torch, "bin")])
def test_the_layout_of_bert_is_read(tmp_path, save, ending):
    path = tmp_path / f"model.{ending}"
    save(BERT, path)
    prefix = "" if ending == "safetensors" else "state_dict.bert."

    def name(variable):
        there = old_name(variable)
        return est.Transpose(prefix + there.name) if isinstance(there, est.Transpose) else prefix + there

    estimator = warm(path, name)
    np.testing.assert_allclose(predict(estimator), by_hand(BERT), rtol=1e-5, atol=1e-5)
    report = estimator.warm_start_report
    assert len(report.used) == len(BERT) - 1 and report.unexpected == (f"{prefix}pooler.dense.weight",)


@pytest.mark.slow
def test_weights_of_half_precision_become_float32(tmp_path):
    torch = pytest.importorskip("torch")
    dtypes = dict(zip(BERT, 4 * ["bfloat16", "float16"], strict=True))
    halves = {name: torch.from_numpy(value).to(getattr(torch, dtypes[name])) for name, value in BERT.items()}
    torch.save(halves, tmp_path / "model.pt")
    rounded = {name: np.asarray(value.astype(jnp.dtype(dtypes[name])), np.float32) for name, value in BERT.items()}
    np.testing.assert_allclose(predict(warm(tmp_path / "model.pt")), by_hand(rounded), rtol=1e-5, atol=1e-5)


def test_all_that_is_wrong_is_in_one_error(tmp_path):
    save_safetensors(BERT | {"embeddings.LayerNorm.bias": weight(5)}, tmp_path / "model.safetensors")
    kernel, norm = "bert/encoder/layer/0/attention/self/query/kernel", "bert/embeddings/LayerNorm"
    names = {kernel: "query.weight", f"{norm}/beta": "embeddings.LayerNorm.bias"}
    names |= {f"{norm}/gamma": est.Transpose("embeddings.word_embeddings.weight")}
    with pytest.raises(ValueError) as raised:
        predict(warm(tmp_path / "model.safetensors", names))
    text = str(raised.value)
    assert f"says that {kernel!r} was 'query.weight', but " in text and "Did you mean one of ['" in text
    assert "Variables to warm-start have other shapes or dtypes in the source." in text
    lines = {line.split(":")[0].strip(): line for line in text.splitlines()}
    assert kernel in lines["missing (5)"]
    assert "encoder.layer.0.attention.self.query.weight" in lines["unexpected (6)"]
    assert f"{norm}/beta, float32[5] there, float32[4] in the model" in lines["mismatched (2)"]
    assert f"{norm}/gamma, float32[4, 6] there, float32[4] in the model" in lines["mismatched (2)"]


def test_axes_are_those_of_the_file(tmp_path):
    kernel = weight(5, 3, 2, 4)  # outputs, inputs, height, width
    np.savez(tmp_path / "conv.npz", **{"conv.weight": kernel})

    def conv_fn(features, labels, mode, params):
        est.get_variable("kernel", (2, 4, 3, 5))
        return est.EstimatorSpec(mode, predictions=features * est.read_variable("kernel").sum())

    def read(axes):
        settings = est.WarmStartSettings(
            tmp_path / "conv.npz", "kernel", {"kernel": est.Transpose("conv.weight", axes)}
        )
        estimator = est.Estimator(conv_fn, warm_start_from=settings, params={})
        list(estimator.predict(lambda: np.ones(1, np.float32)))
        return estimator.warm_start_report

    assert read((2, 3, 1, 0)).used == {"kernel": "conv.weight"}
    with pytest.raises(ValueError, match=r"has 2 axes, and the array 4. Give one for each of its dimensions."):
        read((1, 0))
    with pytest.raises(ValueError, match=r"needs each axis once, such as \(2, 3, 1, 0\); got \(0, 0\)."):
        est.Transpose("conv.weight", (0, 0))
    with pytest.raises(ValueError, match="`est.Transpose` needs the name of an array in a file; got ''."):
        est.Transpose("")


def test_exported_variables_are_the_file_that_they_began_with(tmp_path):
    """By the same function, with what training has changed."""
    numpy = pytest.importorskip("safetensors.numpy")
    save_safetensors(BERT, tmp_path / "model.safetensors")
    settings = est.WarmStartSettings(tmp_path / "model.safetensors", "bert/", old_name)
    trained = est.Estimator(model_fn, tmp_path / "model", warm_start_from=settings)
    trained.train(lambda: [(IDS, np.array([0, 1], np.int32))])
    est.export_variables(tmp_path / "out.safetensors", tmp_path / "model", old_name, "bert/")
    out = numpy.load_file(tmp_path / "out.safetensors")
    assert out.keys() == BERT.keys() - {"pooler.dense.weight"}
    query = "encoder.layer.0.attention.self.query.weight"
    kernel = trained.get_variable_value("bert/encoder/layer/0/attention/self/query/kernel")
    np.testing.assert_array_equal(out[query], kernel.T)
    assert (out[query] != BERT[query]).any()
    np.testing.assert_array_equal(predict(warm(tmp_path / "out.safetensors")), predict(trained))
    est.export_variables(tmp_path / "all.safetensors", tmp_path / "model", {"classifier/bias": "b"})
    assert set(numpy.load_file(tmp_path / "all.safetensors")) == {
        name for name in trained.get_variable_names() if name not in ("global_step", "classifier/bias")
    } | {"b"}


def test_dtypes_and_transposes_of_any_axes_are_exported(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    kernel = weight(5, 3, 2, 4)
    arrays = {"conv/kernel": kernel.transpose(2, 3, 1, 0), "half": np.ones(3, jnp.bfloat16), "n": np.arange(2)}
    save_safetensors({name: np.ascontiguousarray(x) for name, x in arrays.items()}, tmp_path / "a.safetensors")
    names = {"conv/kernel": est.Transpose("conv.weight", (2, 3, 1, 0))}
    est.export_variables(tmp_path / "b.safetensors", tmp_path / "a.safetensors", names)
    out = numpy.load_file(tmp_path / "b.safetensors")
    np.testing.assert_array_equal(out["conv.weight"], kernel)
    assert out["half"].dtype == jnp.bfloat16 and out["n"].dtype == np.int64


DTYPES = ["bool", "complex64", "bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"]
DTYPES += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32)]
KINDS_OF_ARRAYS = {f"{dtype}/{len(shape)}": (dtype, shape) for dtype in DTYPES for shape in ((), (1,), (2, 3))}


def values_of(dtype, shape):
    return (np.arange(np.prod(shape, dtype=int)) % 2 + 1).astype(jnp.dtype(dtype)).reshape(shape)


@pytest.mark.slow
def test_every_shape_and_dtype_is_in_each_file_what_it_was_in_the_model(tmp_path):
    pytest.importorskip("safetensors")

    def all_fn(features, labels, mode):
        start = mode == est.ModeKeys.TRAIN and not warm_started
        for name, kind in KINDS_OF_ARRAYS.items():
            est.get_variable(name, initializer=values_of(*kind) if start else np.zeros_like(values_of(*kind)))
        return est.EstimatorSpec(mode, predictions=features, loss=jnp.zeros(()), train_op=est.group())

    warm_started, x = False, np.ones((1, 1), np.float32)
    first = est.Estimator(all_fn, tmp_path / "first").train(lambda: [x])
    export = first.export_model(tmp_path / "export", x)
    file = tmp_path / "file.safetensors"
    est.export_variables(file, tmp_path / "first")
    warm_started = True
    settings = est.WarmStartSettings(str(file), [".*/"])
    est.Estimator(all_fn, tmp_path / "second", warm_start_from=settings).train(lambda: [x])
    est.export_variables(tmp_path / "again.safetensors", tmp_path / "second")
    assert (tmp_path / "again.safetensors").read_bytes() == file.read_bytes()
    for path in (tmp_path / "first", export, file, tmp_path / "second"):
        assert dict(est.list_variables(path)).items() >= {n: [*s] for n, (_, s) in KINDS_OF_ARRAYS.items()}.items()
        for name, (dtype, shape) in KINDS_OF_ARRAYS.items():
            got = est.load_variable(path, name)
            assert got.dtype == jnp.dtype(dtype) and got.shape == shape, (path, name)
            np.testing.assert_array_equal(got, values_of(dtype, shape), err_msg=f"{path} {name}")


@pytest.mark.parametrize("dtype", [*DTYPES, "float8_e5m2fnuz", "float8_e8m0fnu", "int64", "float64"])
def test_tensors_of_every_shape_and_dtype_are_read(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    shapes = (), (0,), (2, 3)
    torch.save({str(shape): torch.ones(shape).to(getattr(torch, dtype)) for shape in shapes}, tmp_path / "w.pt")
    for shape in shapes:
        got = est.load_variable(tmp_path / "w.pt", str(shape))
        assert got.dtype == jnp.dtype(dtype) and got.shape == shape and (got.astype(complex) == 1).all()


def test_dtypes_that_a_format_lacks_are_refused(tmp_path):
    pytest.importorskip("safetensors")
    np.savez(tmp_path / "a.npz", half=np.ones(2, jnp.bfloat16), whole=np.ones(()), text=np.array("a"))
    assert est.load_variable(tmp_path / "a.npz", "whole").shape == ()
    with pytest.raises(ValueError, match=r"cannot read \['half'\] in '.*a.npz': numpy .*as float32, or in"):
        est.load_variable(tmp_path / "a.npz", "half")
    with pytest.raises(
        ValueError, match=r"'text' is of dtype <U1, which a .safetensors file lacks. .*`vars_to_export`"
    ):
        est.export_variables(tmp_path / "b.safetensors", tmp_path / "a.npz", None, "text")


@pytest.mark.parametrize(
    "path, names, pattern, message",
    [
        ("b.npz", None, ".*", "`est.export_variables` writes a file *.safetensors; got the path "),
        ("b.safetensors", None, "c", "vars_to_export='c' matches no variable of "),
        ("b.safetensors", {"aa": "x"}, ".*", "names has ['aa'], which are not exported of "),
        ("b.safetensors", {"a": "b"}, ".*", "names gives 'b' to 'b' and to another variable. Change one."),
        (
            "b.safetensors",
            lambda name: None,
            ".*",
            "must give a string or an `est.Transpose` for each variable; got None",
        ),
    ],
)
def test_what_cannot_be_exported_is_refused(tmp_path, path, names, pattern, message):
    pytest.importorskip("safetensors")
    np.savez(tmp_path / "a.npz", a=np.ones(2), b=np.ones(2))
    with pytest.raises(ValueError, match=re.escape(message)):
        est.export_variables(tmp_path / path, tmp_path / "a.npz", names, pattern)
    assert [each.name for each in tmp_path.iterdir()] == ["a.npz"]


def test_a_pickle_of_objects_is_refused(tmp_path):
    pytest.importorskip("torch").save({"w": re.compile("a")}, tmp_path / "model.pt")
    message = r"cannot read '.*model.pt' as weights of PyTorch: UnpicklingError: .*Write it by `torch.save\(model.state"
    with pytest.raises(ValueError, match=message):
        est.list_variables(tmp_path / "model.pt")


@pytest.mark.parametrize(
    "package, call",
    [
        ("torch", lambda path: est.list_variables(path / "model.pt")),
        ("safetensors", lambda path: est.export_variables(path / "b.safetensors", path / "a.npz")),
    ],
)
def test_without_the_package_the_error_says_what_to_install(tmp_path, monkeypatch, package, call):
    (tmp_path / "model.pt").touch()
    for name in [package, *(each for each in sys.modules if each.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"pip install -e '\.\[{package}\]'") as info:
        call(tmp_path)
    assert isinstance(info.value.__cause__, ModuleNotFoundError)


def nested(torch):
    """A dict that holds the one before twice, so that a few hundred bytes stand for a billion tensors."""
    return functools.reduce(lambda inner, _: {"a": inner, "b": inner}, range(30), {"w": torch.zeros(1)})


HOSTILE = {
    "again and again": (nested, "it has more than 1000 values"),
    "itself": (lambda torch: (each := {}, each.update(a=each))[0], "maximum recursion depth exceeded"),
    "sparse": (lambda torch: {"w": torch.eye(3).to_sparse()}, "its tensor 'w' is sparse, or has no values"),
    "no values": (lambda torch: {"w": torch.empty(10**12, device="meta")}, "its tensor 'w' is sparse, or has no"),
    "compressed": (lambda torch: {"w": torch.zeros(10**6)}, "it is compressed"),
}


@pytest.mark.parametrize("make, message", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_torch_file_is_an_error_that_names_it(tmp_path, monkeypatch, make, message):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("estimator.storage._torch_file._MOST_VALUES", 1000)
    path = tmp_path / "a.pt"
    torch.save(make(torch), path)
    if message == "it is compressed":
        with zipfile.ZipFile(path) as file:
            members = {member.filename: file.read(member) for member in file.infolist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            for name, contents in members.items():
                file.writestr(name, contents)
    with pytest.raises(
        ValueError, match=rf"`est.list_variables` cannot read '{path}' as weights of PyTorch: .*{message}"
    ):
        est.list_variables(path)


def test_a_tensor_that_repeats_its_bytes_is_listed_without_them(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.zeros(1).expand(10**13), "b": torch.ones(2)}, tmp_path / "a.pt")
    assert est.list_variables(tmp_path / "a.pt") == [("b", [2]), ("w", [10**13])]
    assert est.load_variable(tmp_path / "a.pt", "b").tolist() == [1, 1]
