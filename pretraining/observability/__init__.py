"""What a run tells: metrics, throughput, the progress line, trackers."""
