"""The shard of the input that this process should read."""

from __future__ import annotations

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class InputContext:
    """The place of a process among those that read an input together.

    Attributes:
      index: 0 to `count - 1`; TensorFlow's `input_pipeline_id`.
      count: how many processes there are; TensorFlow's `num_input_pipelines`.
    """

    index: int
    count: int

    def per_process_batch_size(self, global_batch_size: int) -> int:
        """The number of rows of a batch that each process should give.

        Raises:
          ValueError: the batch cannot be split into that many equal parts.
        """
        if global_batch_size % self.count:
            raise ValueError(
                f"The global_batch_size {global_batch_size} is not divisible by the number of processes, {self.count}."
            )
        return global_batch_size // self.count


def input_context() -> InputContext:
    """The place of this process among those that train together: for an `input_fn`, which gives its own part of all.

    >>> examples = list(range(6))
    >>> context = input_context()
    >>> context, examples[context.index :: context.count]
    (InputContext(index=0, count=1), [0, 1, 2, 3, 4, 5])
    >>> context.per_process_batch_size(64)
    64
    """
    return InputContext(jax.process_index(), jax.process_count())
