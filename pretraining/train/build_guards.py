"""Makes what watches over a run's updates."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from pretraining.data.loader import Loader
from pretraining.distributed.replicas import Replicas
from pretraining.observability.observer import Observer
from pretraining.progress import Interval
from pretraining.train.parts import Parts
from pretraining.train.spikes import SpikeDetector
from pretraining.train.stability import Guards
from pretraining.train.step import StepContext


def build_spike_detector(parts: Parts, loader: Loader) -> SpikeDetector | None:
    """What judges the losses of the run, if it is to be."""
    guard, data = parts.config.guard, parts.config.data
    if guard.spike_threshold is None:
        return None
    # Another mixture, another batch or a document mask shifts the losses: what was usual before says nothing then.
    conditions = {"phases": len(loader.reader.mixture.phases), "document_mask": data.document_mask}
    return SpikeDetector(guard.spike_threshold, guard.spike_window, parts.processes.device, conditions)


def build_guards(parts: Parts, mesh: DeviceMesh, context: StepContext, loader: Loader, observer: Observer) -> Guards:
    """What ends the run where it goes wrong.

    Args:
        parts: of the run.
        mesh: that the model is sharded over.
        context: what a step works with.
        loader: of the training's batches.
        observer: shows what guards say.
    """

    def samples_of(first_step: int, last_step: int) -> tuple[int, int]:
        mixture = loader.reader.mixture
        return mixture.first_sample(first_step - 1), mixture.first_sample(last_step)

    guard = parts.config.guard
    return Guards(
        guard,
        samples_of=samples_of,
        replicas=Replicas(context.parameters, mesh),
        replica_check=Interval(guard.replica_check_interval, parts.training_tokens),
        activity=parts.processes.activity,
        note=observer.note,
    )
