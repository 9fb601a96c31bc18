"""One process of a job of several runs: reads (port, arguments) pairs as JSON and trains each run, one after the other.

Started by `forked.run_forked`: importing torch once and training many runs is what keeps tests fast.
"""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch
from emulated_float8 import emulate_float8

from pretraining.config.read import load_train_config
from pretraining.distributed import gradient_buckets
from pretraining.launch.layout import resolve_layout
from pretraining.tools.evaluate import evaluate_and_print
from pretraining.train.preemption import StopRequests
from pretraining.train.run import train

if __name__ == "__main__":
    torch.set_num_threads(1)
    gradient_buckets.BUCKET_BYTES = 5000  # a replicated model has several, each of one parameter or of a few
    # A run needs a meeting place of its own: in torchrun's, it would find the addresses that the run before it left.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for port, arguments in json.loads(sys.argv[1]):
        os.environ["MASTER_PORT"] = str(port)
        if any(each.startswith("float8=") for each in arguments):
            emulate_float8(pytest.MonkeyPatch())
        config, layout = load_train_config(arguments), resolve_layout(os.environ)
        if config.evaluation.eval_only:
            evaluate_and_print(config, layout, StopRequests())
        else:
            train(config, layout)
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's end: after several process groups in one process, torch's threads were once seen to
    # abort there, long after the work was done.
    os._exit(0)
