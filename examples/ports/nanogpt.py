"""Port of nanoGPT: a small GPT in Flax, which learns the letters of a text; weight decay for matrices only.

    python examples/ports/nanogpt.py --towers 4

The original is cgarciae/nanoGPT-jax: `model.py`, of which little changes, and `train.py`, of which little is left. The
text is what scikit-learn says about its data sets.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn import datasets

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

TEXT = "".join(load().DESCR for load in (datasets.load_iris, datasets.load_wine, datasets.load_diabetes))
CHARS = sorted(set(TEXT))
PARAMS = {
    "block_size": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 64,
    "dropout": 0.1,
    "learning_rate": 3e-3,
    "warmup_iters": 100,
    "lr_decay_iters": 1000,
    "weight_decay": 0.1,
    "grad_clip": 1.0,
    "batch_size": 64,
}
INIT = nn.initializers.normal(0.02)


class CausalSelfAttention(nn.Module):
    n_head: int
    dropout: float

    @nn.compact
    def __call__(self, x, train):
        batch, time, width = x.shape
        q, k, v = jnp.split(nn.Dense(3 * width, kernel_init=INIT, name="c_attn")(x), 3, axis=-1)
        q, k, v = (y.reshape(batch, time, self.n_head, width // self.n_head).swapaxes(1, 2) for y in (q, k, v))
        att = q @ k.swapaxes(-1, -2) / np.float32(np.sqrt(width // self.n_head))
        att = nn.softmax(jnp.where(np.tri(time, dtype=bool), att, -jnp.inf))
        att = nn.Dropout(self.dropout, deterministic=not train)(att)
        y = (att @ v).swapaxes(1, 2).reshape(x.shape)
        return nn.Dropout(self.dropout, deterministic=not train)(nn.Dense(width, kernel_init=INIT, name="c_proj")(y))


class Block(nn.Module):
    n_head: int
    dropout: float

    @nn.compact
    def __call__(self, x, train):
        x = x + CausalSelfAttention(self.n_head, self.dropout, name="attn")(nn.LayerNorm(name="ln_1")(x), train)
        y = nn.gelu(nn.Dense(4 * x.shape[-1], kernel_init=INIT, name="c_fc")(nn.LayerNorm(name="ln_2")(x)))
        y = nn.Dense(x.shape[-1], kernel_init=INIT, name="mlp_c_proj")(y)
        return x + nn.Dropout(self.dropout, deterministic=not train)(y)


class GPT(nn.Module):
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float

    @nn.compact
    def __call__(self, idx, train):
        wte = nn.Embed(len(CHARS), self.n_embd, embedding_init=INIT, name="wte")
        wpe = nn.Embed(self.block_size, self.n_embd, embedding_init=INIT, name="wpe")
        x = wte(idx) + wpe(jnp.arange(idx.shape[1]))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        for i in range(self.n_layer):
            x = Block(self.n_head, self.dropout, name=f"h_{i}")(x, train)
        return wte.attend(nn.LayerNorm(name="ln_f")(x))


def configure_optimizers(params):
    def partition(variables):
        return jax.tree.map(lambda x: "decay" if x.ndim >= 2 else "no_decay", variables)

    schedule = optax.warmup_cosine_decay_schedule(
        0.0, params["learning_rate"], params["warmup_iters"], params["lr_decay_iters"], params["learning_rate"] / 10
    )
    adamw = {
        "decay": optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=params["weight_decay"]),
        "no_decay": optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.0),
    }
    return optax.chain(optax.clip_by_global_norm(params["grad_clip"]), optax.multi_transform(adamw, partition))


def model_fn(features, labels, mode, params):
    config = {key: params[key] for key in ("block_size", "n_layer", "n_head", "n_embd", "dropout")}
    logits = est.flax_module(GPT(**config), "gpt")(features, train=mode == est.ModeKeys.TRAIN)
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions={"next": logits[:, -1].argmax(-1)})
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    train_op = TowerOptimizer(configure_optimizers(params)).minimize(loss)
    return est.EstimatorSpec(mode, loss=loss, train_op=train_op)


def load_data():
    ids = np.array([CHARS.index(char) for char in TEXT], np.int32)
    size = PARAMS["block_size"]

    def pieces(ids, every):
        starts = range(0, len(ids) - size, every)
        return np.stack([ids[i : i + size] for i in starts]), np.stack([ids[i + 1 : i + size + 1] for i in starts])

    return pieces(ids[:-1000], 3), pieces(ids[-1000:], size)


def main(towers=4, steps=1000, model_dir=None, **params):
    params = PARAMS | params
    (train_x, train_y), (test_x, test_y) = load_data()
    gpt = est.Estimator(replicate_model_fn(model_fn, devices=jax.devices()[:towers]), model_dir, params=params)
    train_input_fn = est.inputs.numpy_input_fn(train_x, train_y, params["batch_size"], None, shuffle=True, seed=0)
    test_input_fn = est.inputs.numpy_input_fn(test_x, test_y, 100, shuffle=False)
    metrics = gpt.train(train_input_fn, steps=steps).evaluate(test_input_fn)
    predictions = list(gpt.predict(test_input_fn))
    served = est.load_exported(gpt.export_model(f"{gpt.model_dir}/export", test_x))
    return gpt, metrics, predictions, served(test_x)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--towers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.towers)
    gpt, metrics, _, _ = main(**vars(args))
    print(metrics)
    ids = [CHARS.index(char) for char in "The data set".rjust(PARAMS["block_size"])]
    exported = est.load_exported(gpt.export_model(f"{gpt.model_dir}/export", np.array([ids], np.int32)))
    for _ in range(60):
        ids.append(int(exported(np.array([ids[-PARAMS["block_size"] :]], np.int32))["next"][0]))
    print("".join(CHARS[i] for i in ids).strip())
