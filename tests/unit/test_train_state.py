from __future__ import annotations

from pretraining.progress import Progress, TrainState


def test_a_step_adds_its_tokens_and_remembers_where_it_came_from() -> None:
    state = TrainState(total_steps=5, stop_step=5, tokens_per_step=10, progress=Progress(2, 20))
    assert state.before == state.progress
    state.advance(1.5)
    assert (state.before, state.progress) == (Progress(2, 20), Progress(3, 30, 1.5))


def test_an_invocation_may_stop_before_the_run_is_finished() -> None:
    state = TrainState(total_steps=5, stop_step=1, tokens_per_step=10, progress=Progress(0, 0))
    stops_at_once = state.stopping
    state.advance(0.0)
    assert not stops_at_once and state.stopping and not state.finished
    assert TrainState(5, 5, 10, Progress(5, 50)).finished


def test_the_first_request_to_end_ends_the_invocation_and_gives_the_reason() -> None:
    state = TrainState(total_steps=5, stop_step=5, tokens_per_step=10, progress=Progress(0, 0))
    state.advance(0.0, stop=0)
    before = (state.preempted, state.stopping)
    state.advance(0.0, stop=15)
    state.request_stop(10)
    state.request_stop(0)
    assert before == (False, False)
    assert state.preempted and state.stopping and not state.finished and state.stop == 15
