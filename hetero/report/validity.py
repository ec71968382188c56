"""Whether the times of a run are valid for machines of its instance types."""

from __future__ import annotations

from hetero.report.model import RunFacts

__all__ = ["cost_objection", "missing_emulation"]

_FLAGS = {"emulate_sample_s": "--emulate-sample-seconds", "emulate_step_s": "--emulate-step-seconds"}
_USED = {
    ("--emulate-sample-seconds",): "preprocess with the CPUs of this machine, not with the vCPUs of their types",
    ("--emulate-step-seconds",): "compute with this machine, not with the accelerators of their types",
    tuple(_FLAGS.values()): "work with this machine, not with the vCPUs and accelerators of their types",
}


def missing_emulation(run: RunFacts) -> list[str]:
    """Return the flags that are missing for simulated hosts to work like machines of their types.

    The list is empty for a run on real hosts, because they preprocess and compute with their own hardware.
    """
    if not run.simulated or any(usage.scope != "tree" for usage in run.hosts):
        return []
    return [flag for option, flag in _FLAGS.items() if run.options.get(option) == "None"]


def cost_objection(run: RunFacts) -> str:
    """Return why prices of instance types times the times of this run are not a cost. Empty if they are a cost."""
    missing = missing_emulation(run)
    if not missing:
        return ""
    if run.options.get("data service") == "tf":
        to_do = "Run the job on the machines: TensorFlow's data service emulates no vCPUs."
    else:
        to_do = f"Give {' and '.join(missing)}, or run the job on the machines."
    return f"Costs are not known, because simulated hosts {_USED[tuple(missing)]}. {to_do}"
