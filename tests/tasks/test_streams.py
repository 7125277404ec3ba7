"""Random numbers: the published generator, the right distributions, no address used twice."""

import numpy as np
import pytest
import scipy.stats

from energylab.tasks.streams import normal_pairs, philox, stream_key, uniform_pairs


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers_of_the_random123_distribution(counter, key, words):
    drawn = philox(key, tuple(np.array([word], np.uint64) for word in counter))
    assert tuple(int(word[0]) for word in drawn) == words


def draw(seed=0, stream="train", purpose=0, tasks=50, blocks=200, step=0):
    return uniform_pairs(
        stream_key(seed, stream), np.arange(blocks), np.array(purpose), np.arange(tasks)[:, None], step
    )


def test_distributions():
    u, v = draw()
    for uniform in (u, v):
        assert uniform.min() >= 0
        assert uniform.max() < 1
        assert scipy.stats.kstest(uniform.ravel(), "uniform").pvalue > 1e-3
    a, b = normal_pairs(u, v)
    for normal in (a, b):
        assert scipy.stats.kstest(normal.ravel(), "norm").pvalue > 1e-3
    pairs = [(a, b), (a[:, 1:], a[:, :-1]), (a[1:], a[:-1]), (np.abs(a), np.abs(b)), (u, v)]
    for left, right in pairs:
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 4 / np.sqrt(left.size)


def test_the_ends_of_the_unit_interval_give_finite_normals():
    ends = np.array([0.0, 1 - 2.0**-53])
    assert np.isfinite(normal_pairs(ends, ends)).all()


def test_every_address_has_its_own_number():
    """Seeds, streams, purposes and steps, with all their blocks and tasks: no double occurs twice."""
    drawn = [
        draw(seed=seed, stream=stream, purpose=purpose, step=step)
        for seed, stream, purpose, step in [
            (0, "train", 0, 0),
            (1, "train", 0, 0),
            (0, "test", 0, 0),
            (0, "train", 1, 0),
            (0, "train", 0, 1),
        ]
    ]
    numbers = np.concatenate([np.ravel(pair) for pair in drawn])
    assert len(np.unique(numbers)) == numbers.size


def test_the_key_tells_seed_from_stream():
    keys = {
        stream_key(seed, stream) for seed in range(100) for stream in ("train", "test", "initialisation", "0", "1/0")
    }
    assert len(keys) == 500
