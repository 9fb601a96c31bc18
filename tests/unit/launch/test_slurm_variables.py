"""SLURM's compressed notations are read without SLURM."""

from __future__ import annotations

import pytest

from pretraining.errors import LaunchError
from pretraining.launch.layout import first_node, tasks_of_nodes


@pytest.mark.parametrize(
    ("node_list", "first"),
    [
        ("node1", "node1"),
        ("node[01-03,7],gpu-a", "node01"),
        ("gpu-a,node[01-03]", "gpu-a"),
        ("node[7,01-03]", "node7"),
        ("rack[1-2]node[004-010]", "rack1node004"),
        ("node[1-2].cluster.example", "node1.cluster.example"),
        ("10.0.0.5,10.0.0.6", "10.0.0.5"),
    ],
)
def test_the_first_node_of_a_list(node_list: str, first: str) -> None:
    assert first_node(node_list) == first


@pytest.mark.parametrize("node_list", ["", "node[", "node[a-b]", ",node1", "node 1"])
def test_a_node_list_of_another_form_is_refused(node_list: str) -> None:
    with pytest.raises(LaunchError, match="Cannot read the node list"):
        first_node(node_list)


@pytest.mark.parametrize(("text", "tasks"), [("2", (2,)), ("4(x2),1", (4, 4, 1)), ("1,8(x3)", (1, 8, 8, 8))])
def test_tasks_on_each_node(text: str, tasks: tuple[int, ...]) -> None:
    assert tasks_of_nodes(text) == tasks


@pytest.mark.parametrize("text", ["", "two", "4(x)", "4x2", "4(x2),"])
def test_tasks_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="SLURM_STEP_TASKS_PER_NODE"):
        tasks_of_nodes(text)
