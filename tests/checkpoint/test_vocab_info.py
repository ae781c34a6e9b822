"""Warm start of variables whose rows follow the strings of a vocabulary."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import refused

import estimator as est
from estimator.checkpoint._warm_start import warm_start

OLD = ["the", "cat", "sat", "on"]
NEW = ["on", "mat", "the", "a", "cat"]
TABLE = np.arange(10, dtype=np.float32).reshape(5, 2) + 1  # 4 strings and a bucket


@functools.cache
def initial(shape):
    def model_fn(features, labels, mode):
        est.get_variable("words", shape)
        est.get_variable("logits/kernel", (2, 5))
        return est.EstimatorSpec(mode, features, jnp.sum(features), est.group())

    return est.transform(model_fn).init(jax.random.key(0), np.ones(2, np.float32))


@pytest.fixture
def files(tmp_path):
    np.savez(tmp_path / "old.npz", **{"words": TABLE, "logits/kernel": TABLE.T[:, :4], "renamed": TABLE})
    (tmp_path / "old.txt").write_text("\n".join(OLD) + "\n")
    (tmp_path / "new.txt").write_text("\n".join(NEW))
    return tmp_path


def info(files, *args, **options):
    return est.VocabInfo(str(files / "new.txt"), *(args or (5, 1)), str(files / "old.txt"), **options)


def start(files, infos, pattern="words", renames=None, shape=(6, 2)):
    settings = est.WarmStartSettings(str(files / "old.npz"), pattern, renames, infos)
    state, _ = warm_start(settings, initial(shape), ["words", "logits/kernel"], est.ModeKeys.TRAIN)
    return jax.tree.map(np.asarray, state.variables)


def test_rows_are_moved_by_their_strings_and_others_are_zero_as_in_tensorflow(files):
    got = start(files, {"words": info(files)})["words"]
    np.testing.assert_array_equal(got, [TABLE[3], [0, 0], TABLE[0], [0, 0], TABLE[1], [0, 0]])


@pytest.mark.covers("8 vocab remap")
def test_new_rows_have_the_values_of_the_backup_initializer(files):
    normal = jax.nn.initializers.normal(1.0)
    got = start(files, {"words": info(files, backup_initializer=normal)})["words"]
    np.testing.assert_array_equal(got[[0, 2, 4]], TABLE[[3, 0, 1]])
    assert np.unique(got[[1, 3, 5]]).size == 6 and 0 not in got


def test_columns_are_moved_where_the_axis_is_1(files):
    got = start(files, {"logits/kernel": info(files, 5, 0, axis=1)}, "logits")["logits/kernel"]
    np.testing.assert_array_equal(got.T, [TABLE[3], [0, 0], TABLE[0], [0, 0], TABLE[1]])


def test_only_the_first_strings_of_vocabularies_count_where_sizes_say_so(files):
    infos = {"words": info(files, 3, 1, old_vocab_size=2)}
    got = start(files, infos, renames={"words": "renamed"}, shape=(4, 2))["words"]
    np.testing.assert_array_equal(got, [[0, 0], [0, 0], TABLE[0], [0, 0]])


REFUSED = {
    ValueError: [
        (
            lambda files: start(files, {"word": info(files)}),
            "`var_name_to_vocab_info` names 'word', which was not used",
        ),
        (lambda files: start(files, {"words": 3}), "must be a dict of `est.VocabInfo` by new names; got {'words': 3}"),
        (lambda files: start(files, {"words": info(files, 4, 1)}), r"the variable 5 rows in dimension 0; got 4 str"),
        (lambda files: start(files, {"words": info(files, 7, 0)}, shape=(7, 2)), "must have as many .*; got 5 strings"),
        (lambda files: start(files, {"words": info(files, axis=2)}, shape=(5, 2)), "in dimension 2; got 5 strings"),
        (lambda files: start(files, {"words": info(files, old_vocab_size=9)}), "4 strings, with old_vocab_size=9, but"),
        (lambda files: start(files, {"words": info(files)}, shape=(6, 3)), r"words, float32\[6, 2\] there, float32"),
    ]
}


@pytest.mark.parametrize("error, call, message", refused.rows(REFUSED))
def test_vocabularies_that_do_not_fit_are_errors(files, call, error, message):
    with pytest.raises(error, match=message):
        call(files)
