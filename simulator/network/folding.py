"""Activities that must do the same are run once: exact, whatever the topology.

Activities and links are sorted into classes by colour refinement: two activities are alike when they have the same
size, latency and release, wait for alike ones and use alike links as much; two links are alike when they have the same
capacity and are used as much by alike activities. On such classes (an equitable partition) max-min rates are the same
for all members, so one activity and one link of each stand for all. A fault, a mapping or hashed routes that break the
symmetry make more classes, never a wrong answer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .sharing import TOLERANCE, Activities, SharedTimes, run

DIGITS = 9  # of weights and figures that tell classes apart


class Classes(NamedTuple):
    """Class of each activity [n] and of each link [links]."""

    activity: np.ndarray
    link: np.ndarray


def run_folded(activities: Activities, bandwidth_gbps: np.ndarray, tolerance: float = TOLERANCE) -> SharedTimes:
    """As :func:`.sharing.run`, one activity of each class at a time."""
    used, links = np.unique(activities.links, return_inverse=True)
    if len(used) < len(bandwidth_gbps):
        found = run_folded(replace(activities, links=links.reshape(-1)), bandwidth_gbps[used], tolerance)
        carried = np.zeros(len(bandwidth_gbps))
        carried[used] = found.carried_bytes
        return SharedTimes(found.start_us, found.end_us, carried)
    classes = classify(activities, bandwidth_gbps)
    if len(activities) == 0 or classes.activity.max() + 1 == len(activities):
        return run(activities, bandwidth_gbps, tolerance)
    found = run(_quotient(activities, classes), bandwidth_gbps[_first(classes.link)], tolerance)
    of, on = classes
    return SharedTimes(found.start_us[of], found.end_us[of], found.carried_bytes[on])


def classify(activities: Activities, bandwidth_gbps: np.ndarray) -> Classes:
    """The coarsest classes that are alike in everything that rates and times depend on."""
    owner = np.repeat(np.arange(len(activities)), np.diff(activities.start))
    waiting = np.repeat(np.arange(len(activities)), np.diff(activities.waits_start))
    weight = _word(activities.weights)
    own = _mixed(
        _word(activities.size_bytes) + _mixed(_word(activities.latency_us) + _mixed(_word(activities.release_us)))
    )
    capacity = _mixed(_word(np.asarray(bandwidth_gbps, dtype=np.float64)))
    of, on = _ranked(own), _ranked(capacity)
    while True:
        counts = of.max(initial=-1), on.max(initial=-1)
        told = _mixed(own + _sums(owner, _mixed(_mixed(_word(on[activities.links])) + weight), len(of)))
        told += _sums(waiting, _mixed(_word(of[activities.waits]) + np.uint64(7)), len(of))
        seen = _mixed(capacity + _sums(activities.links, _mixed(_mixed(_word(of[owner])) + weight), len(on)))
        of, on = _ranked(_mixed(told) + _mixed(_word(of))), _ranked(seen + _mixed(_word(on)))
        if counts == (of.max(initial=-1), on.max(initial=-1)):
            return Classes(of, on)


def _quotient(activities: Activities, classes: Classes) -> Activities:
    """One activity of each class; its weight on a class of links is that of all its like on one of those links."""
    of, on = classes
    members, links = _first(of), _first(on)
    owner = np.repeat(np.arange(len(activities)), np.diff(activities.start))
    kept = links[on[activities.links]] == activities.links
    width = int(on.max(initial=-1)) + 1
    keys, which = np.unique(of[owner[kept]] * width + on[activities.links[kept]], return_inverse=True)
    weights = np.bincount(which, activities.weights[kept], minlength=len(keys)).astype(np.float64)
    waits = [of[activities.waits[activities.waits_start[i] : activities.waits_start[i + 1]]] for i in members.tolist()]
    return Activities(
        np.searchsorted(keys // max(width, 1), np.arange(len(members) + 1)),
        keys % max(width, 1),
        weights,
        activities.size_bytes[members],
        activities.latency_us[members],
        activities.release_us[members],
        np.concatenate([[0], np.cumsum([len(each) for each in waits])]).astype(np.int64),
        np.concatenate([np.zeros(0, dtype=np.int64), *waits]),
    )


def _first(classes: np.ndarray) -> np.ndarray:
    """The first member of each class."""
    return np.unique(classes, return_index=True)[1]


def _ranked(values: np.ndarray) -> np.ndarray:
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def _sums(keys: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Sums modulo 2^64 by key."""
    out = np.zeros(size, dtype=np.uint64)
    np.add.at(out, keys, values)
    return out


def _word(values: np.ndarray) -> np.ndarray:
    """Each value as 64 bits; floats to ``DIGITS`` digits."""
    if values.dtype == np.float64:
        scale = 10.0 ** (DIGITS - 1 - np.floor(np.log10(np.maximum(np.abs(values), 1e-300))))
        return (np.round(values * scale) / scale).view(np.uint64).copy()
    return values.astype(np.uint64)


def _mixed(words: np.ndarray) -> np.ndarray:
    """Well-spread words from neighbouring ones (the finaliser of splitmix64)."""
    x = words + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
