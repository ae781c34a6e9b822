"""The names that TensorFlow's checkpoints have for the slots of optimizers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from jax.tree_util import DictKey, GetAttrKey, keystr, tree_leaves_with_path

from estimator.checkpoint._named_arrays import SLOT_PREFIX, by_user_name, leaves_on_disk
from estimator.core._state import State


def tensorflow_slot_names(state: State, old_name: Callable[[str], str]) -> dict[str, str]:
    """TensorFlow's names of the slots of a state, by their names here.

    The optimizer "Adam" has there, of the variable "dense/kernel", "dense/kernel/Adam" and "dense/kernel/Adam_1", in
    the order of its slots, and beside the variables "beta1_power". A second one, "Adam_1" here, has "beta1_power_1"
    there, while the slots of its variables are named as the first one's.

    Args:
      state: as it is here.
      old_name: returns the name that a variable has in the checkpoint.
    """
    user_names = {key: name for name, key in by_user_name(leaves_on_disk(state)).items()}
    names: dict[str, str] = {}
    count: Counter[tuple[str, str]] = Counter()
    for path, _ in tree_leaves_with_path(state.slots):
        optimizer = path[0].key
        kind, number = re.fullmatch(r"(.*?)((?:_\d+)?)", optimizer).groups()  # type: ignore[union-attr]
        begin = next((i for i, key in enumerate(path[1:], 1) if isinstance(key, DictKey)), None)
        if begin is not None and path[begin].key in state.variables:
            variable = keystr(path[begin:], simple=True, separator="/")
            position = count[optimizer, variable]
            count[optimizer, variable] += 1
            there = f"{old_name(variable)}/{kind}" + (f"_{position}" if position else "")
        elif begin is None and isinstance(path[-1], GetAttrKey):
            there = path[-1].name + number
        else:
            continue
        names[user_names[SLOT_PREFIX + keystr(path, simple=True, separator="/")]] = there
    return names
