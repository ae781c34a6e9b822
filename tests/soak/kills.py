"""Trainings that are ended again and again, by SIGKILL, Ctrl-C and SIGTERM, to end like one that was not."""

import itertools
import os
import pathlib
import random
import re
import signal
import time

from testing.cluster import shared_cluster
from testing.estimators import saved_at, step_of, unfinished, values
from testing.scenarios.killed_training import STEPS, make

WITHIN, ANYWHERE = "SIGKILL within a write", "SIGKILL at any time"  # beside signals while it trains
LEFT = re.compile(r"ckpt-\d+$|events\.|history|metrics|settings|run_id")
TRAIN = "testing.scenarios.killed_training.train"


class Soak:
    """Trainings that are ended by signals.

    Args:
      folder: where their directories are made.
      seed: of the moments.

    Attributes:
      codes: of the processes that were ended, pairs of the way and the exit code.
      differ: trainings whose variables, or files, are not those of an undisturbed one, and how.
    """

    def __init__(self, folder, seed):
        self.codes, self.differ = [], []
        self._folder = pathlib.Path(folder)
        self._random = random.Random(seed)
        self._cluster = shared_cluster()
        self._numbers = itertools.count()

    def run(self, name, ways, compiles_all=False, harm=None):
        """Ends a training in these ways, and then lets it end by itself; returns its variables.

        Args:
          harm: called with the model_dir after each end; damages something there, but not all checkpoints.
          compiles_all: whether the undisturbed training uses no program that another process has compiled.
        """
        model_dir = self._folder / str(next(self._numbers))
        for way in ways:
            if not self._end(name, model_dir, way, harm is not None):
                break
            if harm:
                harm(model_dir)
        want, got = self._finish(name, self._folder / f"whole {name}", compiles_all), self._finish(name, model_dir)
        if want.keys() != got.keys() or any(want[key].tobytes() != got[key].tobytes() for key in want):
            self.differ.append(f"{model_dir}: other variables than an undisturbed training")
        if not harm and (left := [file for file in os.listdir(model_dir) if not LEFT.match(file)]):
            self.differ.append(f"{model_dir}: {left} is left")
        return got

    def _end(self, name, model_dir, way, damaged):
        """Ends a process; returns False if the training was done before."""
        before, cluster, rng = saved_at(model_dir), self._cluster, self._random
        if way == WITHIN:
            self._start_until_it_writes(name, model_dir, saves_first=len(self.codes) % 2 == 0)
        elif way == ANYWHERE:
            cluster.start(TRAIN + rng.choice(["", "_with_slow_disk"]), name, model_dir, processes=1)
            time.sleep(rng.uniform(0, 5))
        else:
            lines = rng.randrange(1, 6)
            cluster.start(TRAIN, name, model_dir, False, lines + 3, processes=1)

            def trains_or_has_ended():
                return sum(line.startswith("step ") for line in cluster.lines()) >= lines or not cluster.is_alive()

            cluster.wait_until(trains_or_has_ended, f"it has not printed {lines} steps")
            time.sleep(rng.uniform(0, 0.03))
        if is_alive := cluster.is_alive():
            cluster.kill(number=signal.SIGKILL if way in (WITHIN, ANYWHERE) else way)
        (ended,) = cluster.ended()
        assert is_alive or ended.code == 0, ended.lines
        if not ended.code:
            return False
        self.codes.append((way, ended.code))
        saved = saved_at(model_dir)
        if not damaged and (saved[-1:] < before[-1:] or saved and step_of(make(name, model_dir)) != saved[-1]):
            self.differ.append(f"{model_dir}: it had the checkpoints {before}, and has {saved} after {way}")
        return True

    def _start_until_it_writes(self, name, model_dir, saves_first):
        """Starts a process that writes its first checkpoint or, if it `saves_first`, a later one; stops it there."""
        left, before = unfinished(model_dir), saved_at(model_dir)[-1:]
        self._cluster.start(f"{TRAIN}_with_slow_disk", name, model_dir, processes=1)
        while True:
            while (saves_first and saved_at(model_dir)[-1:] == before) or not unfinished(model_dir) - left:
                assert self._cluster.is_alive(), "the training ended before it was seen within a write"
                time.sleep(0.002)
            self._cluster.kill(number=signal.SIGSTOP)
            if unfinished(model_dir) - left:
                return
            self._cluster.kill(number=signal.SIGCONT)  # it was done with the write in the meantime

    def _finish(self, name, model_dir, compiles_all=False):
        """The variables where a training has ended by itself."""
        (ended,) = self._cluster.run(TRAIN, name, model_dir, compiles_all, processes=1, timeout=300)
        last = [line.split()[1:] for line in ended.lines if line.startswith("remembered")]
        if ended.code or last != [[str(step) for step in range(10, STEPS + 1, 10)]][: len(last)]:
            self.differ.append(f"{model_dir}: the last process ended with {ended.code}, and its hook with {last}")
        return values(make(name, model_dir))
