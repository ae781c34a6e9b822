"""The models of real shapes in PyTorch Lightning on the CPU: `Trainer.fit`, with its bar, logger and checkpoint.

python benchmarks/peers/real/with_lightning.py resnet --data FOLDER
"""

import itertools

import data
import lightning
import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

import common  # isort: skip


def pad_same(x, size, strides, value=0.0):
    """As XLA pads for "SAME": the odd one is behind."""
    total = max(size - strides, 0)
    return functional.pad(x, (total // 2, total - total // 2) * 2, value=value)


class ResNet(nn.ModuleDict):
    def __init__(self):
        super().__init__()
        self.add("stem", 3, data.FILTERS[0], 7, 2)
        for name, inputs, filters, strides in data.blocks():
            self.add(f"{name}_a", inputs, filters, 3, strides)
            self.add(f"{name}_b", filters, filters, 3, 1)
            if strides > 1:
                self.add(f"{name}_short", inputs, filters, 1, strides)
        self["out"] = nn.Linear(data.FILTERS[-1], data.CLASSES)

    def add(self, name, inputs, filters, size, strides):
        padding = 0 if strides > 1 else size // 2
        self[name] = nn.Conv2d(inputs, filters, size, strides, padding, bias=False)
        self[f"{name}_norm"] = nn.BatchNorm2d(filters, data.EPSILON, 1 - data.MOMENTUM)

    def conv(self, x, name):
        conv = self[name]
        if conv.stride[0] > 1:
            x = pad_same(x, conv.kernel_size[0], conv.stride[0])
        return self[f"{name}_norm"](conv(x))

    def forward(self, x):
        x = functional.relu(self.conv(x, "stem"))
        x = functional.max_pool2d(pad_same(x, 3, 2, -torch.inf), 3, 2)
        for name, _, _, strides in data.blocks():
            y = self.conv(functional.relu(self.conv(x, f"{name}_a")), f"{name}_b")
            x = functional.relu(y + (self.conv(x, f"{name}_short") if strides > 1 else x))
        return self["out"](x.mean((2, 3)))


class Bert(nn.ModuleDict):
    def __init__(self):
        width = data.WIDTH
        super().__init__({"words": nn.Embedding(data.WORDS, width), "positions": nn.Embedding(data.LENGTH, width)})
        sizes = {"qkv": (width, 3 * width), "mix": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
        self.update({f"{name}{i}": nn.Linear(*size) for name, size in sizes.items() for i in range(data.BLOCKS)})
        self.update({"pool": nn.Linear(width, width), "out": nn.Linear(width, 2)})
        names = ("norm", *(f"norm{kind}{i}" for kind in "ab" for i in range(data.BLOCKS)))
        self.update({name: nn.LayerNorm(width, data.TINY) for name in names})

    def forward(self, x):
        words, lengths = x
        mask = (torch.arange(data.LENGTH) < lengths[:, None])[:, None, None]
        x = self["norm"](self["words"](words) + self["positions"].weight)
        for i in range(data.BLOCKS):
            q, k, v = self[f"qkv{i}"](x).unflatten(-1, (3, data.HEADS, -1)).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
            x = self[f"norma{i}"](x + self[f"mix{i}"](mixed))
            up = functional.gelu(self[f"up{i}"](x), approximate="tanh")
            x = self[f"normb{i}"](x + self[f"down{i}"](up))
        return self["out"](torch.tanh(self["pool"](x[:, 0])))


class WideDeep(nn.ModuleDict):
    def __init__(self):
        sizes = (data.COLUMNS * data.ROW + data.NUMBERS, *data.HIDDEN, 1)
        super().__init__({f"deep{i}": nn.Linear(*sizes[i : i + 2]) for i in range(len(sizes) - 1)})
        for i in range(data.COLUMNS):  # whose gradients have the looked-up rows only
            self[f"c{i:02}"] = nn.Embedding(data.BUCKETS, data.ROW, sparse=True)
            self[f"w{i:02}"] = nn.Embedding(data.BUCKETS, 1, sparse=True)

    def forward(self, x):
        ids, numbers = x
        deep, wide = ([self[f"{kind}{i:02}"](ids[:, i]) for i in range(data.COLUMNS)] for kind in "cw")
        x = torch.cat([*deep, numbers], -1)
        for i in range(len(data.HIDDEN)):
            x = functional.relu(self[f"deep{i}"](x))
        return self[f"deep{len(data.HIDDEN)}"](x) + sum(wide)


class Tagger(nn.ModuleDict):
    def __init__(self):
        super().__init__(
            {
                "words": nn.Embedding(data.TAGGER_WORDS, data.TAGGER_WIDTH),
                "lstm": nn.LSTM(data.TAGGER_WIDTH, data.UNITS, batch_first=True, bidirectional=True),
                "out": nn.Linear(2 * data.UNITS, data.TAGS),
            }
        )
        self.crf = nn.Parameter(torch.zeros(data.TAGS, data.TAGS))
        for name in ("bias_hh_l0", "bias_hh_l0_reverse"):  # a second bias, which other libraries lack
            getattr(self["lstm"], name).requires_grad_(False)

    def forward(self, x):
        words, lengths = x
        packed = nn.utils.rnn.pack_padded_sequence(self["words"](words), lengths, True, enforce_sorted=False)
        outputs, _ = nn.utils.rnn.pad_packed_sequence(self["lstm"](packed)[0], True, total_length=data.STEPS)
        return self["out"](outputs), self.crf, lengths


def crf_likelihood(scores, transitions, lengths, tags):
    runs = torch.arange(scores.shape[1]) < lengths[:, None]
    unary = scores.gather(2, tags[..., None])[..., 0]
    right = (unary * runs).sum(1) + (transitions[tags[:, :-1], tags[:, 1:]] * runs[:, 1:]).sum(1)
    sums = scores[:, 0]
    for i in range(1, scores.shape[1]):
        after = scores[:, i] + torch.logsumexp(sums[..., None] + transitions, 1)
        sums = torch.where(runs[:, i, None], after, sums)
    return right - torch.logsumexp(sums, -1)


def crf_decode(scores, transitions, lengths):
    runs = torch.arange(scores.shape[1]) < lengths[:, None]
    best, before = scores[:, 0], []
    for i in range(1, scores.shape[1]):
        values, places = (best[..., None] + transitions).max(1)
        best = torch.where(runs[:, i, None], scores[:, i] + values, best)
        before.append(torch.where(runs[:, i, None], places, torch.arange(best.shape[1])))
    tags = [best.argmax(-1)]
    for places in reversed(before):
        tags.append(places.gather(1, tags[-1][:, None])[:, 0])
    return torch.stack(tags[::-1], 1) * runs


class Training(lightning.LightningModule):
    def __init__(self, work):
        super().__init__()
        networks = {"resnet": ResNet, "bert": Bert, "wide_deep": WideDeep, "tagger": Tagger}
        self.model, self.module = work.model, networks[work.model]()

    def mean_loss(self, batch):
        x, y = batch
        outputs = self.module(x)
        if self.model == "tagger":
            return -crf_likelihood(*outputs, y).mean()
        if self.model == "wide_deep":
            return functional.binary_cross_entropy_with_logits(outputs, y)
        return functional.cross_entropy(outputs, y)

    def training_step(self, batch, index):
        loss = self.mean_loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("loss", self.mean_loss(batch), batch_size=len(batch[1]))

    def predict_step(self, batch, index):
        outputs = self.module(batch[0])
        if self.model == "tagger":
            return crf_decode(*outputs)
        return torch.sigmoid(outputs) if self.model == "wide_deep" else outputs.argmax(-1)

    def configure_optimizers(self):
        parameters = [each for each in self.parameters() if each.requires_grad]
        if self.model == "bert":
            adamw = torch.optim.AdamW(parameters, data.PEAK, weight_decay=data.DECAY)
            warming = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: min(1.0, (step + 1) / data.WARM_UP))
            return {"optimizer": adamw, "lr_scheduler": {"scheduler": warming, "interval": "step"}}
        rate = data.RATES[self.model]
        if self.model == "resnet":
            return torch.optim.SGD(parameters, rate, momentum=0.9)
        if self.model == "wide_deep":
            return torch.optim.Adagrad(parameters, rate, initial_accumulator_value=0.1, eps=1e-7)
        return torch.optim.Adam(parameters, rate)


class Batches(IterableDataset):
    def __init__(self, work, part, count=None):
        self.work, self.part, self.count = work, part, count

    def __iter__(self):
        for x, y in itertools.islice(data.batches(self.work, self.part), self.count):
            if self.work.model == "resnet":
                x = torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))
            else:
                x = tuple(torch.from_numpy(each).long() if each.dtype == np.int32 else torch.tensor(each) for each in x)
            yield x, torch.tensor(y).long() if y.dtype == np.int32 else torch.tensor(y)


class Clock(lightning.Callback):
    def __init__(self, watch):
        self.watch = watch

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.watch.done(index + 1)


def state_of(work):
    """The initial values by torch's names, and in its layouts: outputs first, channels before pixels."""
    state = {}
    for name, value in work.initial().items():
        layer, kind = name.split("/")
        if layer == "crf":
            state["crf"] = torch.from_numpy(value)
            continue
        if layer in ("forwards", "backwards"):
            i, g, f, o = np.split(value, 4, -1)
            value, end = np.concatenate([i, f, g, o], -1), "_reverse" * (layer == "backwards")
            inputs, states = np.split(value.T, [data.TAGGER_WIDTH], 1) if kind == "kernel" else (value, 0 * value)
            for what, part in (("ih", inputs), ("hh", states)):
                full = f"lstm.{'weight' if kind == 'kernel' else 'bias'}_{what}_l0{end}"
                state[full] = torch.from_numpy(part.copy())
            continue
        if kind == "kernel":
            value = value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T
        names = {"bias": "bias", "mean": "running_mean", "variance": "running_var"}
        state[f"{layer}.{names.get(kind, 'weight')}"] = torch.from_numpy(value.copy())
    return state


def train(work, watch):
    training = Training(work)
    missing = training.module.load_state_dict(state_of(work), strict=False)
    assert not missing.unexpected_keys
    assert all(name.endswith("num_batches_tracked") for name in missing.missing_keys)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, default_root_dir=common.temporary(), callbacks=[Clock(watch)]
    )

    def loader(part, count=None):
        return DataLoader(Batches(work, part, count), batch_size=None)

    trainer.fit(training, loader("train"))

    def evaluate(count=None):
        return trainer.validate(training, loader("test", count), verbose=False)[0]["loss"]

    def predictions(count=None):
        return trainer.predict(training, loader("test", count))

    evaluate(1), predictions(1)
    watch.rate("prediction", work.rows, predictions)
    return watch.rate("evaluation", work.rows, evaluate)


if __name__ == "__main__":
    common.main(train, {"Lightning": lightning.__version__, "torch": torch.__version__}, data.work_of)
