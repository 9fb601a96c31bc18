"""From the variables that a launcher leaves in the environment to one `ProcessLayout`. Imports no torch."""
