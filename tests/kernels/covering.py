"""A small set of combinations in which every pair of values of any two options occurs."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(options: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Greedy: of some random completions of an uncovered pair, take the one that covers most of what is left."""
    generator = random.Random(seed)
    names = list(options)
    left = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in options[a] for y in options[b]}
    rows = []
    while left:
        start = dict(min(left, key=repr))
        candidates = [{name: start.get(name, generator.choice(options[name])) for name in names} for _ in range(200)]
        best = max(candidates, key=lambda row: len(left & _pairs(row)))
        left -= _pairs(best)
        rows.append(best)
    return rows


def _pairs(row: Mapping[str, Any]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(row.items(), 2))
