"""Timelines for other tools to open."""

from __future__ import annotations

from .perfetto import TraceError, write_trace
from .tracks import Flow, RankTrack, TrackSpan, memory_over_time, pipeline_tracks

__all__ = ["Flow", "RankTrack", "TraceError", "TrackSpan", "memory_over_time", "pipeline_tracks", "write_trace"]
