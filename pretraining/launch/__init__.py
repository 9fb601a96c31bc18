"""The start of a process: its place in the job, its signals, threads and terminal. No torch."""
