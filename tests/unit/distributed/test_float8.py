"""Linear layers of the blocks multiply in float8, and nothing else changes; a missing requirement is named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulated_float8 import emulate_float8, needs_torchao
from tiers import first_quick
from tiny_model import loss_and_gradients, model_with
from torch import Tensor
from torch._inductor import config
from torch.utils._python_dispatch import TorchDispatchMode

from pretraining.config.training import Float8Scaling
from pretraining.distributed.float8 import check_float8
from pretraining.errors import ConfigError
from pretraining.model.llama import Llama

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SCALINGS = ["tensorwise", "rowwise"]
HALF, CHECKPOINTED = "mixed_precision=true", "fsdp_activation_checkpointing=true"


@pytest.fixture(autouse=True)
def same_compiler_settings() -> Iterator[None]:
    """Restore the global settings of float8 after a test."""
    with config.patch(emulate_precision_casts=False):
        yield


def gpu_of(capability: tuple[int, int], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    patch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")


@pytest.mark.parametrize(("device", "capability"), [(CPU, (0, 0)), (GPU, (7, 5)), (GPU, (8, 6)), (GPU, (9, 0))])
def test_float8_is_refused_without_hardware_or_package(
    device: torch.device, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_of(capability, monkeypatch)
    for module in ("torchao", "torchao.float8"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as error:
        check_float8("rowwise", device)
    assert error.value.settings == ("float8",)
    assert ("pip install" in str(error.value)) == (capability == (9, 0))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, single_process: None) -> Iterator[None]:
    """Float8 on the CPU, with graphs run by PyTorch, which saves the time of a C++ compiler."""
    emulate_float8(monkeypatch)
    with torch.compiler.set_stance(force_backend="aot_eager"):
        yield
    torch.compiler.reset()


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@needs_torchao
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("scaling", SCALINGS)
def test_loss_and_gradients_are_those_of_bfloat16_to_the_digits_of_float8(scaling: Float8Scaling) -> None:
    expected = loss_and_gradients(model_with(HALF))
    found = loss_and_gradients(model_with(HALF, f"float8={scaling}"))
    assert list(found) == list(expected)
    assert relative_error(found.pop("loss"), expected.pop("loss")) < 2e-3
    errors = {name: relative_error(gradient, expected[name]) for name, gradient in found.items()}
    assert max(errors.values()) < 0.2, errors
    assert min(error for name, error in errors.items() if "_proj" in name) > 0.01  # it is not bfloat16


class Products(TorchDispatchMode):
    """Counts matrix products of float8 tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default and type(args[0]).__name__ == "Float8TrainingTensor"
        return func(*args, **(kwargs or {}))


@needs_torchao
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("scaling", SCALINGS)
def test_all_layers_multiply_in_float8_and_recomputed_ones_give_the_same_bits(scaling: Float8Scaling) -> None:
    """`op` recomputes no product."""
    flags, results = [HALF, f"float8={scaling}"], []
    recomputed = [[CHECKPOINTED, f"selective_checkpointing={selective}"] for selective in ("1", "op")]
    for more, passes in (([], 3), (recomputed[0], 4), (recomputed[1], 3)):
        model = model_with(*flags, *more)
        with Products() as products:
            results.append(loss_and_gradients(model))
        assert isinstance(model.module, Llama)
        assert products.count == passes * 7 * len(model.module.blocks)
        assert all(torch.equal(results[-1][name], value) for name, value in results[0].items())


@needs_torchao
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("scaling", "selective"),
    first_quick(("rowwise", "op"), ("tensorwise", None), ("rowwise", "1"), ("tensorwise", "op")),
)
def test_blocks_compile_as_whole_graphs(scaling: Float8Scaling, selective: str | None) -> None:
    flags = [HALF, f"float8={scaling}"]
    if selective is not None:
        flags += [CHECKPOINTED, f"selective_checkpointing={selective}"]
    expected = loss_and_gradients(model_with(*flags))
    found = loss_and_gradients(model_with(*flags, "use_torch_compile=true"))
    assert max(relative_error(found[name], value) for name, value in expected.items()) < 1e-6
