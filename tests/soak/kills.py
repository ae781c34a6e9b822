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
from testing.estimators import saved_at, step_of, unfinished, values
from testing.processes import Processes
from testing.scenarios.killed_training import STEPS, make

KILL, CTRL_C, TWICE, SIGTERM, WITHIN = "SIGKILL", "Ctrl-C", "Ctrl-C twice", "SIGTERM", "SIGKILL within a write"
WAYS = [KILL, CTRL_C, WITHIN, SIGTERM, KILL, TWICE, WITHIN, SIGTERM]  # in turns
SIGNALS = {CTRL_C: signal.SIGINT, TWICE: signal.SIGINT, SIGTERM: signal.SIGTERM}
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
        self._numbers = itertools.count()
        self._undisturbed = {}

    def run(self, name, ways, compiles_all=False):
        """Ends a training in these ways, and then lets it end by itself; returns its variables.

        Args:
          compiles_all: whether the undisturbed training uses no program that another process has compiled.
        """
        model_dir = self._folder / str(next(self._numbers))
        for way in ways:
            if not self._end(name, model_dir, way):
                break
        if name not in self._undisturbed:
            self._undisturbed[name] = self._finish(name, self._folder / f"whole {name}", compiles_all)
        want, got = self._undisturbed[name], self._finish(name, model_dir)
        if want.keys() != got.keys() or any(want[key].tobytes() != got[key].tobytes() for key in want):
            self.differ.append(f"{model_dir}: other variables than an undisturbed training")
        if left := [file for file in os.listdir(model_dir) if not LEFT.match(file)]:
            self.differ.append(f"{model_dir}: {left} is left")
        return got

    def close(self):
        self._processes.close()

    def _end(self, name, model_dir, way):
        """Ends a process; returns False if the training was done before."""
        before = saved_at(model_dir)
        if way == WITHIN:
            self._start_until_it_writes(name, model_dir, saves_first=self.codes[way].total() % 2 == 0)
        elif not self._start_until_it_trains(name, model_dir):
            return False
        began = time.monotonic()
        for pause in (0, self._random.uniform(0, 0.1))[: 1 + (way == TWICE)]:
            time.sleep(pause)
            with contextlib.suppress(ProcessLookupError):  # the first was enough
                self._processes.send(SIGNALS.get(way, signal.SIGKILL))
        if code := self._processes.ended():
            self.codes[way][code] += 1
            self.secs[way] = max(self.secs[way], time.monotonic() - began)
        saved = saved_at(model_dir)
        if saved[-1:] < before[-1:] or saved and step_of(make(name, model_dir)) != saved[-1]:
            self.differ.append(f"{model_dir}: it had the checkpoints {before}, and has {saved} after {way}")
        return bool(code)

    def _start_until_it_trains(self, name, model_dir):
        """Starts a process; returns False if it has ended."""
        lines = self._random.randrange(1, 6)
        self._processes.start("train", name, str(model_dir), False, lines + 3)
        for _ in range(lines):
            if not self._processes.read().startswith("step "):
                assert self._processes.ended() == 0
                return False
        time.sleep(self._random.uniform(0, 0.03))
        return True

    def _start_until_it_writes(self, name, model_dir, saves_first):
        """Starts a process that writes its first checkpoint or, if it `saves_first`, a later one; stops it there."""
        left, before = unfinished(model_dir), saved_at(model_dir)[-1:]
        self._processes.start("train_with_slow_disk", name, str(model_dir))
        while True:
            while (saves_first and saved_at(model_dir)[-1:] == before) or not unfinished(model_dir) - left:
                assert self._processes.is_alive(), "the training ended before it was seen within a write"
                time.sleep(0.002)
            self._processes.send(signal.SIGSTOP)
            if unfinished(model_dir) - left:
                return
            self._processes.send(signal.SIGCONT)  # it was done with the write in the meantime

    def _finish(self, name, model_dir, compiles_all=False):
        """The variables where a training has ended by itself."""
        self._processes.start("train", name, str(model_dir), compiles_all)
        lines, code = self._processes.read_to_end()
        steps = [str(step) for step in range(10, STEPS + 1, 10)]
        if code or (lines and lines[-1].split()[1:] != steps):  # none where it was done before
            self.differ.append(f"{model_dir}: the last process ended with {code}, and its hook with {lines[-1:]}")
        return values(make(name, model_dir))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=40, help="how many processes to end")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)  # as the processes have
    with (
        tempfile.TemporaryDirectory() as programs,
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Soak(folder, given.seed)) as soak,
    ):
        compiled.make_folder(pathlib.Path(programs))  # so that all but the first compile nothing
        for name in itertools.cycle(NAMES):
            ended = sum(codes.total() for codes in soak.codes.values())
            if ended >= given.count:
                break
            ways = itertools.islice(itertools.cycle(WAYS), ended, min(ended + ENDS_OF_ONE, given.count))
            soak.run(name, ways)
    for way, codes in soak.codes.items():
        ended = ", ".join(f"{n} with {code}" for code, n in sorted(codes.items()))
        print(f"{way}: {codes.total()} ({ended}), within {soak.secs[way]:.2f} s")
    print(*soak.differ or ["all trainings ended as undisturbed ones, bit for bit, and left nothing"], sep="\n")
    sys.exit(bool(soak.differ))


if __name__ == "__main__":
    main()
