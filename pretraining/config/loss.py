"""How the loss is computed, and what is added to it: the section `loss`."""

from __future__ import annotations

from dataclasses import dataclass

from pretraining.config.fields import setting


@dataclass(frozen=True)
class LossConfig:
    """Logits in memory, and z-loss."""

    loss_chunk_tokens: int | None = setting(
        None,
        "tokens whose logits are in memory at once: fewer need less memory; 0 = all of a micro-batch; "
        "none = 256 on a CPU, else as many as have 2^28 logits (1 GiB in float32)",
        minimum=0,
    )
    z_loss_weight: float = setting(
        0.0,
        "add so many times ln(Z)^2 to the loss of each token, Z the denominator of its softmax, so that logits do not "
        "drift; 1e-4 is common. Reported apart from the loss, and no part of an evaluation's; 0 = none",
        minimum=0,
    )
