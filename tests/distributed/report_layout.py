"""Program of test_launchers.py: resolve the layout, meet the other processes, add up ranks, print what happened."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

import torch
import torch.distributed as dist

from pretraining.launch.layout import resolve_layout

layout = resolve_layout()
os.environ.update(layout.as_environment())
dist.init_process_group("gloo")
total = torch.tensor(layout.rank + 1)
dist.all_reduce(total)
dist.destroy_process_group()
# One write a process, so that lines of several do not mix.
sys.stdout.write(json.dumps({**asdict(layout), "total": total.item()}) + "\n")
