"""What SLURM says in its compressed notations: node lists and tasks a node.

Read without `scontrol`, which containers often lack.
"""

from __future__ import annotations

import re

from pretraining.errors import LaunchError

# A comma that is not inside brackets: those separate numbers of one name.
_BETWEEN_NAMES = re.compile(r",(?![^\[]*\])")
_FIRST_IN_BRACKETS = re.compile(r"\[(\d+)[-,\d]*\]")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def first_node(node_list: str) -> str:
    """The first host of a node list: `node[01-03,7],gpu-a` -> `node01`.

    SLURM places task 0 on the first node of its step's list.

    Raises:
        LaunchError: the list has another form.
    """
    first = _FIRST_IN_BRACKETS.sub(r"\1", _BETWEEN_NAMES.split(node_list)[0])
    if not re.fullmatch(r"[\w.-]+", first):
        raise LaunchError(
            f"Cannot read the node list {node_list!r} of SLURM; export MASTER_ADDR=<host of task 0> before srun."
        )
    return first


def tasks_of_nodes(text: str) -> tuple[int, ...]:
    """Tasks on each node of a step, in node order: `4(x2),1` -> (4, 4, 1).

    Raises:
        LaunchError: the text has another form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise LaunchError(
                f"SLURM_STEP_TASKS_PER_NODE={text!r} is not of the form '4(x2),1'. "
                "srun sets it; start the job with srun, or with torchrun."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)
