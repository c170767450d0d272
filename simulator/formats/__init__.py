"""Timelines for other tools to open."""

from __future__ import annotations

from .perfetto import TimelineError, write_trace
from .tracks import RankTrack, TrackFlow, TrackSpan, memory_over_time, pipeline_tracks

__all__ = ["RankTrack", "TimelineError", "TrackFlow", "TrackSpan", "memory_over_time", "pipeline_tracks", "write_trace"]
