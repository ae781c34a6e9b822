"""A soak: a training that is ended again and again, by SIGKILL, Ctrl-C and SIGTERM, ends like one that was not.

    python tests/soak/kills.py --count 40 --seed 0

Half of the ends are by SIGKILL, half of these where a checkpoint is seen to be within its write; a quarter by Ctrl-C,
once and twice in quick succession; a quarter by SIGTERM. The same command resumes after each. It prints how the
processes ended, and the longest time that they took; these depend on what else the machine does.
"""

import argparse
import collections
import contextlib
import itertools
import os
import pathlib
import random
import re
import signal
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
from testing import compiled
from testing.estimators import values
from testing.processes import Processes
from testing.scenarios import killed_training

WITHIN_A_WRITE, TWICE = "SIGKILL within a write", "Ctrl-C twice"
WAYS = ["SIGKILL", "Ctrl-C", WITHIN_A_WRITE, "SIGTERM", "SIGKILL", TWICE, WITHIN_A_WRITE, "SIGTERM"]  # in turns
SIGNALS = {"Ctrl-C": signal.SIGINT, TWICE: signal.SIGINT, "SIGTERM": signal.SIGTERM}
NAMES = ["grain's MapDataset", "numpy_input_fn"]  # of the trainings
ENDS_OF_ONE = 5  # of a training, at most
LEFT = re.compile(r"ckpt-\d+$|events\.|history")


class Soak:
    """Trainings that are ended by signals.

    Args:
      folder: where their directories are made.
      seed: of the moments.

    Attributes:
      codes: by way, how often processes ended with which code.
      secs: by way, the longest time from the signal to the end of the process.
      differ: trainings whose variables, or files, are not those of an undisturbed one, and how.
    """

    def __init__(self, folder, seed):
        self.codes = collections.defaultdict(collections.Counter)
        self.secs = collections.defaultdict(float)
        self.differ = []
        self._folder = pathlib.Path(folder)
        self._random = random.Random(seed)
        self._processes = Processes("testing.scenarios.killed_training")
        self._undisturbed = {}

    def run(self, count):
        """Ends processes `count` times, and lets each training end by itself after at most five of these."""
        ended = 0
        try:
            for number in itertools.count():
                name, model_dir = NAMES[number % len(NAMES)], self._folder / str(number)
                last = min(ended + ENDS_OF_ONE, count)
                while ended < last and self._end(name, model_dir, WAYS[ended % len(WAYS)]):
                    ended += 1
                self._compare(name, model_dir)
                if ended == count:
                    return
        finally:
            self._processes.close()

    def _end(self, name, model_dir, way):
        """Ends a process; returns False if the training was done before."""
        slow = way == WITHIN_A_WRITE
        self._processes.start("train_with_slow_disk" if slow else "train", name, str(model_dir))
        for _ in range(self._random.randrange(1, 6)):
            if not self._processes.read().startswith("step "):
                assert self._processes.ended() == 0
                return False
        if slow:
            wait_for_write(model_dir)
        else:
            time.sleep(self._random.uniform(0, 0.05))
        began = time.monotonic()
        for pause in (0, self._random.uniform(0, 0.1))[: 1 + (way == TWICE)]:
            time.sleep(pause)
            with contextlib.suppress(ProcessLookupError):  # the first was enough
                self._processes.send(SIGNALS.get(way, signal.SIGKILL))
        code = self._processes.ended()
        if code:
            self.codes[way][code] += 1
            self.secs[way] = max(self.secs[way], time.monotonic() - began)
        return bool(code)

    def _finish(self, name, model_dir):
        """The variables where a training has ended by itself."""
        self._processes.start("train", name, str(model_dir))
        lines, code = self._processes.read_to_end()
        steps = [str(step) for step in range(10, killed_training.STEPS + 1, 10)]
        if code or (lines and lines[-1].split()[1:] != steps):  # none where it was done before
            self.differ.append(f"{model_dir}: the last process ended with {code}, and its hook with {lines[-1:]}")
        return values(killed_training.make(name, model_dir))

    def _compare(self, name, model_dir):
        if name not in self._undisturbed:
            self._undisturbed[name] = self._finish(name, self._folder / f"whole {NAMES.index(name)}")
        want, got = self._undisturbed[name], self._finish(name, model_dir)
        if want.keys() != got.keys() or any(want[key].tobytes() != got[key].tobytes() for key in want):
            self.differ.append(f"{model_dir}: other variables than an undisturbed training")
        if left := [file for file in os.listdir(model_dir) if not LEFT.match(file)]:
            self.differ.append(f"{model_dir}: {left} is left")


def wait_for_write(model_dir):
    """Waits until there is something that no checkpoint is yet."""
    deadline = time.monotonic() + 30
    while all(LEFT.match(file) for file in os.listdir(model_dir)):
        assert time.monotonic() < deadline, "no checkpoint was seen within its write"
        time.sleep(0.001)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=40, help="how many processes to end")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)  # as the processes have
    with tempfile.TemporaryDirectory() as programs, tempfile.TemporaryDirectory() as folder:
        compiled.make_folder(pathlib.Path(programs))  # so that all but the first compile nothing
        soak = Soak(folder, given.seed)
        soak.run(given.count)
    for way, codes in soak.codes.items():
        ended = ", ".join(f"{n} with {code}" for code, n in sorted(codes.items()))
        print(f"{way}: {codes.total()} ({ended}), within {soak.secs[way]:.2f} s")
    print(*soak.differ or ["all trainings ended as undisturbed ones, bit for bit, and left nothing"], sep="\n")
    sys.exit(bool(soak.differ))


if __name__ == "__main__":
    main()
