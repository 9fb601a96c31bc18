from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretraining.observability.trace_events import divide_time

WINDOW = (0.0, 40.0)
spans = st.lists(st.tuples(st.integers(-5, 45), st.integers(0, 9)).map(lambda at: (at[0], at[0] + at[1])), max_size=8)


def moments(stretches: list[tuple[float, float]]) -> set[int]:
    """The whole microseconds that spans of whole numbers cover inside the window."""
    return {moment for start, end in stretches for moment in range(int(start), int(end)) if 0 <= moment < 40}


@given(spans, spans, spans)
def test_every_moment_is_counted_once(
    compute: list[tuple[float, float]], communication: list[tuple[float, float]], data: list[tuple[float, float]]
) -> None:
    shares = divide_time(WINDOW, compute, communication, data)
    computing, communicating, waiting = moments(compute), moments(communication), moments(data)
    assert shares.compute == pytest.approx(len(computing) / 40)
    assert shares.exposed_communication == pytest.approx(len(communicating - computing) / 40)
    assert shares.hidden_communication == pytest.approx(len(communicating & computing) / 40)
    assert shares.data == pytest.approx(len(waiting - computing - communicating) / 40)
    assert shares.compute + shares.exposed_communication + shares.data + shares.idle == pytest.approx(1)
