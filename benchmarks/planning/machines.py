"""The machine types of the scenarios: facts of real types, and prices.

vCPUs, memory and the sustained bandwidth of one network card are those of ``hetero/pricing/data/instance_types.json``.
Prices of 2022 (us-east-1) are those that the articles on heterogeneous clusters and on distributed training state. All
other prices are made up, at a rate per vCPU for each family (see `FAMILY_USD_PER_VCPU`) or per machine (see
`TRAINERS`). They are near the price of c5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["DATA_TYPES", "STATED_USD", "TRAINERS", "MachineType"]

_GBIT = 1e9 / 8
_GIB = 2.0**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineType:
    """One instance type of a scenario."""

    name: str
    hourly_usd: float
    vcpus: int
    speed: float = 1.0
    """Speed of a vCPU, relative to an ml.p3's. A scenario changes it, because it depends on the workload."""
    nic_bytes_per_s: float
    memory_bytes: float
    num_accelerators: int = 0

    @property
    def family(self) -> str:
        """Types of one family have the same processor."""
        return self.name.rpartition(".")[0]


STATED_USD = {
    "ml.c5.9xlarge": 1.836,
    "ml.c5.18xlarge": 3.672,
    "ml.p3.2xlarge": 3.825,
    "ml.p3.8xlarge": 14.688,
    "ml.p3.16xlarge": 28.152,
    "ml.p4d.24xlarge": 37.688,
}
FAMILY_USD_PER_VCPU = {
    "ml.c5": 0.051,
    "ml.c5n": 0.065,
    "ml.c6i": 0.053,
    "ml.c7i": 0.056,
    "ml.m5": 0.058,
    "ml.r5": 0.076,
}
FAMILY_SPEED = {"ml.c5": 1.45, "ml.c5n": 1.45, "ml.c6i": 1.6, "ml.c7i": 1.8, "ml.m5": 1.35, "ml.r5": 1.35}
"""Made up. c5 is near the 1.6 of the article's PyTorch example."""
_SIZES = {
    # vCPUs, memory in GiB, network in Gbit/s
    "ml.c5": {"xlarge": (4, 8, 1.25), "2xlarge": (8, 16, 2.5), "4xlarge": (16, 32, 5), "9xlarge": (36, 72, 12)}
    | {"18xlarge": (72, 144, 25)},
    "ml.c5n": {"2xlarge": (8, 21, 10), "4xlarge": (16, 42, 15), "9xlarge": (36, 96, 50), "18xlarge": (72, 192, 100)},
    "ml.c6i": {"2xlarge": (8, 16, 3.125), "4xlarge": (16, 32, 6.25), "8xlarge": (32, 64, 12.5)}
    | {"16xlarge": (64, 128, 25), "32xlarge": (128, 256, 50)},
    "ml.c7i": {
        "2xlarge": (8, 16, 3.125),
        "4xlarge": (16, 32, 6.25),
        "8xlarge": (32, 64, 12.5),
        "24xlarge": (96, 192, 37.5),
    },
    "ml.m5": {"xlarge": (4, 16, 1.25), "2xlarge": (8, 32, 2.5), "4xlarge": (16, 64, 5), "12xlarge": (48, 192, 12)}
    | {"24xlarge": (96, 384, 25)},
    "ml.r5": {"2xlarge": (8, 64, 2.5), "4xlarge": (16, 128, 5), "12xlarge": (48, 384, 12)},
}


def _data_types() -> tuple[MachineType, ...]:
    return tuple(
        MachineType(
            name=f"{family}.{size}",
            hourly_usd=STATED_USD.get(f"{family}.{size}", round(FAMILY_USD_PER_VCPU[family] * vcpus, 4)),
            vcpus=vcpus,
            speed=FAMILY_SPEED[family],
            nic_bytes_per_s=gbit * _GBIT,
            memory_bytes=gib * _GIB,
        )
        for family, sizes in _SIZES.items()
        for size, (vcpus, gib, gbit) in sizes.items()
    )


def _trainer(
    name: str, accelerators: int, vcpus: int, gib: float, gbit: float, usd: float, speed: float
) -> MachineType:
    return MachineType(
        name=name,
        hourly_usd=STATED_USD.get(name, usd),
        vcpus=vcpus,
        speed=speed,
        nic_bytes_per_s=gbit * _GBIT,
        memory_bytes=gib * _GIB,
        num_accelerators=accelerators,
    )


DATA_TYPES = {each.name: each for each in _data_types()}
"""CPU machines by name."""
TRAINERS = {
    each.name: each
    for each in (
        _trainer("ml.p3.2xlarge", 1, 8, 61, 2.5, 0.0, 1.0),
        _trainer("ml.p3.8xlarge", 4, 32, 244, 10, 0.0, 1.0),
        _trainer("ml.p3.16xlarge", 8, 64, 488, 25, 0.0, 1.0),
        _trainer("ml.p3dn.24xlarge", 8, 96, 768, 100, 35.0, 1.2),
        _trainer("ml.p4d.24xlarge", 8, 96, 1152, 100, 0.0, 1.35),
        _trainer("ml.g4dn.xlarge", 1, 4, 16, 5, 0.74, 1.35),
        _trainer("ml.g4dn.2xlarge", 1, 8, 32, 10, 1.06, 1.35),
        _trainer("ml.g4dn.12xlarge", 4, 48, 192, 50, 5.5, 1.35),
        _trainer("ml.g5.xlarge", 1, 4, 16, 2.5, 1.41, 1.5),
        _trainer("ml.g5.2xlarge", 1, 8, 32, 5, 1.52, 1.5),
        _trainer("ml.g5.8xlarge", 1, 32, 128, 25, 3.06, 1.5),
        _trainer("ml.g5.12xlarge", 4, 48, 192, 40, 7.09, 1.5),
        _trainer("ml.g5.48xlarge", 8, 192, 768, 100, 20.4, 1.5),
    )
}
"""Machines with accelerators by name."""


def made_up(machine: MachineType, *, nic_gbit: float) -> MachineType:
    """Return a machine with another NIC, under another name."""
    return replace(
        machine, name=f"lab.{machine.name}-nic{nic_gbit:g}g".replace("ml.", ""), nic_bytes_per_s=nic_gbit * _GBIT
    )
