from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pretraining.distributed.grad_norm import clip_gradients, gradient_norm


def gradients_of_norm_five() -> list[torch.Tensor]:
    return [torch.tensor([3.0]), torch.tensor([[0.0, 4.0]])]


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_the_norm_covers_all_gradients_and_shows_a_value_that_is_not_finite(poison: float) -> None:
    gradients = gradients_of_norm_five()
    assert float(gradient_norm(gradients, world())) == pytest.approx(5.0)
    gradients[1][0, 0] = poison
    assert not torch.isfinite(gradient_norm(gradients, world()))


@pytest.mark.parametrize("scale", [1.0, 64.0])
@pytest.mark.parametrize(("threshold", "norm_after"), [(1.0, 1.0), (10.0, 5.0), (0.0, 5.0)])
def test_clipping_shortens_long_gradients_and_undoes_the_scale(
    threshold: float, norm_after: float, scale: float
) -> None:
    gradients = [scale * gradient for gradient in gradients_of_norm_five()]
    clip_gradients(gradients, torch.tensor(5.0), threshold, torch.tensor(scale))
    assert float(torch.nn.utils.get_total_norm(gradients)) == pytest.approx(norm_after, rel=1e-5)
