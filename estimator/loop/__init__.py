"""The loop around the steps: input, programs, hooks; training, evaluation, prediction."""
