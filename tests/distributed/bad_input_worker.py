"""One process of a job that makes several mistakes: runs each command line it is given and says how it ended."""

from __future__ import annotations

import json
import os
import sys

from pretraining import cli

if __name__ == "__main__":
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    cli.HEAD_START = 0.0  # this process goes on after an error, and prints what the other one says
    for number, (port, arguments) in enumerate(json.loads(sys.argv[1])):
        os.environ["MASTER_PORT"] = str(port)
        try:
            cli.main(["train", *arguments])
            status = 0
        except SystemExit as ending:
            status = int(ending.code or 0)
        print(f"mistake {number} rank {os.environ['RANK']} status {status}", flush=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # for the reason that training_worker.py gives
