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

from .sharing import END_TOLERANCE, Activities, SharedTimes, run_activities

SIGNIFICANT_DIGITS = 9  # of weights and figures that tell classes apart


class Classes(NamedTuple):
    """Class of each activity [n] and of each link [links]."""

    activity: np.ndarray
    link: np.ndarray


def run_folded(activities: Activities, bandwidth_gbps: np.ndarray, tolerance: float = END_TOLERANCE) -> SharedTimes:
    """As :func:`.sharing.run_activities`, one activity of each class at a time."""
    used, links = np.unique(activities.links, return_inverse=True)
    if len(used) < len(bandwidth_gbps):
        times = run_folded(replace(activities, links=links.reshape(-1)), bandwidth_gbps[used], tolerance)
        carried = np.zeros(len(bandwidth_gbps))
        carried[used] = times.carried_bytes
        return SharedTimes(times.start_us, times.end_us, carried)
    classes = classify(activities, bandwidth_gbps)
    if len(activities) == 0 or classes.activity.max() + 1 == len(activities):
        return run_activities(activities, bandwidth_gbps, tolerance)
    times = run_activities(_fold(activities, classes), bandwidth_gbps[_first_members(classes.link)], tolerance)
    activity_class, link_class = classes
    return SharedTimes(times.start_us[activity_class], times.end_us[activity_class], times.carried_bytes[link_class])


def classify(activities: Activities, bandwidth_gbps: np.ndarray) -> Classes:
    """The coarsest classes that are alike in everything that rates and times depend on."""
    owner = np.repeat(np.arange(len(activities)), np.diff(activities.start))
    waiting = np.repeat(np.arange(len(activities)), np.diff(activities.waits_start))
    weight = _to_words(activities.weights)
    activity_words = _mix_words(
        _to_words(activities.size_bytes)
        + _mix_words(_to_words(activities.latency_us) + _mix_words(_to_words(activities.release_us)))
    )
    capacity = _mix_words(_to_words(np.asarray(bandwidth_gbps, dtype=np.float64)))
    activity_class, link_class = _number_values(activity_words), _number_values(capacity)
    while True:
        counts = activity_class.max(initial=-1), link_class.max(initial=-1)
        activity_marks = _mix_words(
            activity_words
            + _sum_by_key(
                owner, _mix_words(_mix_words(_to_words(link_class[activities.links])) + weight), len(activity_class)
            )
        )
        activity_marks += _sum_by_key(
            waiting, _mix_words(_to_words(activity_class[activities.waits]) + np.uint64(7)), len(activity_class)
        )
        link_marks = _mix_words(
            capacity
            + _sum_by_key(
                activities.links, _mix_words(_mix_words(_to_words(activity_class[owner])) + weight), len(link_class)
            )
        )
        activity_class, link_class = (
            _number_values(_mix_words(activity_marks) + _mix_words(_to_words(activity_class))),
            _number_values(link_marks + _mix_words(_to_words(link_class))),
        )
        if counts == (activity_class.max(initial=-1), link_class.max(initial=-1)):
            return Classes(activity_class, link_class)


def _fold(activities: Activities, classes: Classes) -> Activities:
    """One activity of each class; its weight on a class of links is that of all its like on one of those links."""
    activity_class, link_class = classes
    members, links = _first_members(activity_class), _first_members(link_class)
    owner = np.repeat(np.arange(len(activities)), np.diff(activities.start))
    representative = links[link_class[activities.links]] == activities.links
    width = int(link_class.max(initial=-1)) + 1
    keys, which = np.unique(
        activity_class[owner[representative]] * width + link_class[activities.links[representative]],
        return_inverse=True,
    )
    weights = np.bincount(which, activities.weights[representative], minlength=len(keys)).astype(np.float64)
    waits = [
        activity_class[activities.waits[activities.waits_start[i] : activities.waits_start[i + 1]]]
        for i in members.tolist()
    ]
    return Activities(
        np.searchsorted(keys // max(width, 1), np.arange(len(members) + 1)),
        keys % max(width, 1),
        weights,
        activities.size_bytes[members],
        activities.latency_us[members],
        activities.release_us[members],
        np.concatenate([[0], np.cumsum([len(row) for row in waits])]).astype(np.int64),
        np.concatenate([np.zeros(0, dtype=np.int64), *waits]),
    )


def _first_members(classes: np.ndarray) -> np.ndarray:
    """The first member of each class."""
    return np.unique(classes, return_index=True)[1]


def _number_values(values: np.ndarray) -> np.ndarray:
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def _sum_by_key(keys: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Sums modulo 2^64 by key."""
    out = np.zeros(size, dtype=np.uint64)
    np.add.at(out, keys, values)
    return out


def _to_words(values: np.ndarray) -> np.ndarray:
    """Each value as 64 bits; floats to ``SIGNIFICANT_DIGITS`` digits."""
    if values.dtype == np.float64:
        scale = 10.0 ** (SIGNIFICANT_DIGITS - 1 - np.floor(np.log10(np.maximum(np.abs(values), 1e-300))))
        return (np.round(values * scale) / scale).view(np.uint64).copy()
    return values.astype(np.uint64)


def _mix_words(words: np.ndarray) -> np.ndarray:
    """Well-spread words from neighbouring ones (the finaliser of splitmix64)."""
    x = words + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
