"""Timelines for other tools to open."""
