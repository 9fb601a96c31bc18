"""The file in which earlier versions kept the samples of a rollback; a start of this one needs none."""

ROLLBACK_FILE = "rollback.json"
