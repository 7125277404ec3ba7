"""Random numbers addressed by what they are for, instead of by what was drawn before them.

A counter-based generator is a bijection of (key, counter). The key is a hash of (root seed, stream); the counter spells
out (block, purpose, task, step). So every number of every task has an address of its own: a task is the same whichever
worker draws it and however large its batch is, its first points do not depend on how many follow, and no state, global
or local, exists.

Philox-4x32 with 10 rounds is written out in numpy because numpy's own `Philox` builds one generator object a counter,
which for a batch of 32 tasks costs more than the linear algebra; here one call serves all tasks.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import hashlib

import numpy as np

_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)

WORDS = 2**32
"""How many values each of block, purpose, task and step can take."""


def philox(
    key: tuple[int, int], counter: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Philox-4x32-10: four 32-bit words (held in uint64) for each counter of four 32-bit words; the four arrays
    broadcast.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> _HALF) ^ c1 ^ np.uint64(k0),
            product_1 & _LOW,
            (product_0 >> _HALF) ^ c3 ^ np.uint64(k1),
            product_0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL_0) % WORDS, (k1 + _WEYL_1) % WORDS
    return c0, c1, c2, c3


def stream_key(seed: int, stream: str) -> tuple[int, int]:
    """The 64-bit key of a stream of a root seed. Different names give unrelated numbers."""
    digest = hashlib.blake2b(f"{seed}/{stream}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def uniform_pairs(
    key: tuple[int, int], block: np.ndarray, purpose: np.ndarray, task: np.ndarray, step: int
) -> tuple[np.ndarray, np.ndarray]:
    """Two independent uniforms on [0, 1), with all 53 bits of a double, for each broadcast (block, purpose, task)."""
    words = np.uint64
    a, b, c, d = philox(key, (block.astype(words), purpose.astype(words), task.astype(words), np.array(step, words)))
    eleven = np.uint64(11)
    return (((a << _HALF) | b) >> eleven) * 2.0**-53, (((c << _HALF) | d) >> eleven) * 2.0**-53


def normal_pairs(u: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Box-Muller: two independent standard normals from two independent uniforms on [0, 1)."""
    radius = np.sqrt(-2.0 * np.log1p(-u))
    angle = 2.0 * np.pi * v
    return radius * np.cos(angle), radius * np.sin(angle)
