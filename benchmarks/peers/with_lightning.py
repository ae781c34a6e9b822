"""PyTorch Lightning on the CPU: `Trainer.fit` over a `DataLoader`, with its progress bar, logger and checkpoint.

python benchmarks/peers/with_lightning.py mlp
"""

import common
import lightning
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(32, 64), nn.Linear(64, 1)

    def forward(self, x):
        return self.out(functional.relu(self.hidden(x)))


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv0, self.conv1 = nn.Conv2d(1, 16, 3, padding="same"), nn.Conv2d(16, 32, 3, padding="same")
        self.out = nn.Linear(7 * 7 * 32, 10)

    def forward(self, x):
        for conv in (self.conv0, self.conv1):
            x = functional.max_pool2d(functional.relu(conv(x)), 2)
        return self.out(x.flatten(1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        width = common.WIDTH
        self.before, self.between = nn.LayerNorm(width, common.NORM_EPSILON), nn.LayerNorm(width, common.NORM_EPSILON)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        qkv = self.qkv(self.before(x)).unflatten(-1, (3, common.HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.between(x)), approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        width = common.WIDTH
        self.tokens, self.positions = nn.Embedding(common.VOCABULARY, width), nn.Embedding(common.LENGTH, width)
        self.blocks = nn.Sequential(*(Block() for _ in range(common.BLOCKS)))
        self.last, self.out = (
            nn.LayerNorm(common.WIDTH, common.NORM_EPSILON),
            nn.Linear(common.WIDTH, common.VOCABULARY),
        )

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(common.LENGTH))
        return self.out(self.last(self.blocks(x)))


class Training(lightning.LightningModule):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def mean_loss(self, x, y):
        predictions = self.module(x)
        if predictions.ndim == y.ndim:
            return functional.mse_loss(predictions, y)
        return functional.cross_entropy(predictions.flatten(0, -2), y.flatten())

    def training_step(self, batch, index):
        loss = self.mean_loss(*batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), common.LEARNING_RATE)


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
        if layer[:-1] in ("before", "between", "qkv", "mix", "up", "down"):
            layer = f"blocks.{layer[-1]}.{layer[:-1]}"
        if kind == "kernel" and work.model == "cnn" and layer == "out":
            value = value.reshape(7, 7, 32, 10).transpose(2, 0, 1, 3).reshape(-1, 10)
        if kind == "kernel":
            value = value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T
        state[f"{layer}.{'bias' if kind == 'bias' else 'weight'}"] = torch.from_numpy(value.copy())
    return state


def train(work, watch):
    module = {"mlp": MLP, "cnn": CNN, "transformer": Transformer}[work.model]()
    module.load_state_dict(state_of(work))
    x, y = torch.from_numpy(work.x), torch.from_numpy(work.y)
    if work.model == "cnn":
        x = x.reshape(-1, 1, 28, 28)
    if work.model != "mlp":
        y = y.long()
    training = Training(module)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, default_root_dir=common.temporary(), callbacks=[Clock(watch)]
    )
    trainer.fit(training, DataLoader(TensorDataset(x, y), batch_size=work.batch_size))
    with torch.no_grad():
        return training.mean_loss(x[: work.batch_size], y[: work.batch_size]).item()


if __name__ == "__main__":
    common.main(train, {"Lightning": lightning.__version__, "torch": torch.__version__})
