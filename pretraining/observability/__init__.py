"""Observability of a run: metrics, throughput, progress display, events, profiles and trackers."""
