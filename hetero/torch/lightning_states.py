"""What Lightning does with a loader's state. It may load the state too late, and may take a batch ahead of the loop."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hetero.errors import ConfigError

if TYPE_CHECKING:
    from hetero.torch.pipeline import Pipeline

__all__ = ["is_prefetched", "load_pending_state"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_states_and_loaded: list[Any] = []
"""Item 0 is the list of states that Lightning keeps for the present fit loop. The other items are the pipelines that
have loaded their state."""


def load_pending_state(pipeline: Pipeline) -> None:
    """If a pass of Lightning's fit loop begins now, load the state that Lightning has read from a checkpoint.

    Lightning does not always load this state itself. If ``configure_optimizers`` reads
    ``trainer.estimated_stepping_batches``, as a recipe for schedulers does, Lightning builds its loaders before it
    restores the checkpoint. It loads the states of loaders only while it builds them. So a resumed run would begin its
    epoch anew. It would train again on some samples, and leave out others.

    Raises:
        ConfigError: If the checkpoint has the states of another number of loaders. Also if Lightning takes a batch
            before it reads the checkpoint, as it does from a loader without a length.
    """
    loop, is_early = _fit_loop()
    if is_early:
        raise ConfigError(
            "Lightning takes a batch before it restores the checkpoint, so the run would not continue where it was "
            "saved\n  Something builds the loaders early, for example trainer.estimated_stepping_batches in "
            "configure_optimizers, and the loader has no length.\n"
            "  Give the sampler or batch sampler __len__, or compute the number of steps without Lightning."
        )
    if loop is None:
        return
    states = getattr(loop, "_combined_loader_states_to_load", None)
    if states and loop.restarting:
        stateful = [each for each in loop._combined_loader.flattened if hasattr(each, "load_state_dict")]
        # Lightning stores the states in the order of the loaders, without their names.
        if len(stateful) != len(states):
            raise ConfigError(
                f"Lightning's checkpoint has the states of {len(states)} training loaders, this run has "
                f"{len(stateful)}\n  Resume with the loaders of the run that saved the checkpoint."
            )
        # Each loader gets its state once. Otherwise, a later pass of the same fit would go back to the checkpoint. Item
        # 0 of `_states_and_loaded` is the fit's list of states, and the other items are pipelines with a loaded state.
        is_new_fit = not _states_and_loaded or _states_and_loaded[0] is not states
        if is_new_fit:
            _states_and_loaded[:] = [states]
        for loader, state in zip(stateful, states, strict=True):
            has_loaded = any(each is pipeline for each in _states_and_loaded)
            if getattr(loader, "_pipeline", None) is pipeline and not has_loaded:
                _states_and_loaded.append(pipeline)
                pipeline.load_state(state)
    if pipeline.progress.resumed is not None:
        # Take the epoch from Lightning, because limit_train_batches may have ended an epoch before the loader's end.
        pipeline.set_epoch(loop.epoch_progress.current.processed, by_tool=True)


def _fit_loop() -> tuple[Any, bool]:
    """Return Lightning's fit loop that runs a pass in this thread, or None.

    Return also whether Lightning builds loaders for a resumed run before it has restored the checkpoint.
    """
    # Look at the calls in progress, from the inner ones to the outer ones.
    is_building = False
    for name, module, frame in _frames():
        if module.endswith(".loops.fit_loop"):
            # ``advance`` runs a pass. ``setup_data`` builds loaders. ``run`` calls ``setup_data`` after the checkpoint
            # is restored, and other callers call it before.
            if name == "advance":
                return frame.f_locals.get("self"), False
            is_building = name == "setup_data" or (is_building and name != "run")
        elif name == "_run" and module.endswith(".trainer"):
            return None, is_building and frame.f_locals.get("ckpt_path") is not None
    return None, False


def is_prefetched() -> bool:
    """Return whether Lightning takes the first batch of a pass before the loop asks for it.

    It prefetches one batch if a training loader lacks a length.
    """
    return any(name == "__iter__" and module.endswith(".loops.fetchers") for name, module, _ in _frames())


def _frames() -> Iterator[tuple[str, str, Any]]:
    """Yield function, module and frame of the calls in this thread, if Lightning is imported."""
    frame: Any = sys._getframe() if any(package in sys.modules for package in _PACKAGES) else None
    while frame is not None:
        yield frame.f_code.co_name, frame.f_globals.get("__name__", ""), frame
        frame = frame.f_back
