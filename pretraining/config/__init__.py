"""Settings of runs and commands: dataclasses, parsing of recipes and flags, rules. No torch."""
