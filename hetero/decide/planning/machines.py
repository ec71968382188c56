"""The machines that a plan chooses from: facts and prices of the catalogue in the units of the model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hetero.documents.quantities import GIB
from hetero.errors import ConfigError
from hetero.pricing import Catalogue, InstanceTypeInfo, family_of

__all__ = ["Machine", "bigger_machines", "family_of", "is_on_default_menu", "menu_of"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One instance type. Unknown facts are set to None."""

    instance_type: str
    vcpus: int
    memory_bytes: float | None = None
    network_bytes_per_s: float | None = None
    """Sustained bandwidth of the host's first network card in each direction. All batches use this card. For types of
    Google Cloud and Azure, it is the upper limit of the host."""
    num_accelerators: int = 0
    accelerator: str | None = None
    hourly_usd: float | None = None
    is_spot: bool = False
    """Whether `hourly_usd` is a spot price. The platform may take a spot host back."""

    @property
    def family(self) -> str:
        """Family of the type, for example ``c5``. Types of a family have the same processors."""
        return family_of(self.instance_type)

    @classmethod
    def from_info(cls, info: InstanceTypeInfo) -> Machine:
        """Return the machine of a catalogue entry.

        Raises:
            ConfigError: If the number of vCPUs is unknown.
        """
        if info.vcpus is None:
            raise ConfigError(
                f"the number of vCPUs of {info.instance_type} is not known, and a plan needs it\n"
                "  to do: see `hetero prices list`, or state vCPUs and price: --menu CPU:16 --price CPU:16=USD"
            )
        # A host has one address, so all its batches use one network card. Some clouds state only the limit of a host.
        gbps = info.network_card_gbps or info.network_limit_gbps
        return cls(
            instance_type=info.instance_type,
            vcpus=info.vcpus,
            memory_bytes=None if info.memory_gib is None else info.memory_gib * GIB,
            network_bytes_per_s=None if gbps is None else gbps * 1e9 / 8,
            num_accelerators=info.num_accelerators or 0,
            accelerator=info.accelerator,
            hourly_usd=info.hourly_usd,
        )


def is_on_default_menu(info: InstanceTypeInfo) -> bool:
    """Return whether a type may become a data host although the user names no types."""
    return (
        not info.num_accelerators
        and info.vcpus is not None
        and info.hourly_usd is not None
        # Burstable and flex types sustain 20 to 40 % of each vCPU. Their prices are low, so a plan would prefer them.
        # But the model knows nothing of CPU credits, so its answer would be too good.
        and info.cpu_baseline_percent is None
    )


def menu_of(
    catalogue: Catalogue, instance_types: Sequence[str] = (), *, spot_usd: Mapping[str, float] | None = None
) -> tuple[Machine, ...]:
    """Return the machines that may become data hosts.

    Args:
        catalogue: Instance types with prices.
        instance_types: Types to choose from. Empty means all priced types without accelerators. Types that sustain only
            a share of each vCPU are left out, because preprocessing uses the CPUs all the time. A warning names the
            priced types whose vCPUs are not known.
        spot_usd: Spot prices by type in USD per hour. Each adds a second machine of the type.

    Raises:
        ConfigError: If a named type, its price or its vCPUs are unknown. Without names, if no type has a known price
            and known vCPUs.
    """
    spot_usd = spot_usd or {}
    spot_infos = [_with_vcpus(catalogue, name) for name in spot_usd]
    if instance_types:
        # A type that is named twice counts once.
        infos = [_with_vcpus(catalogue, name) for name in dict.fromkeys(instance_types)]
        unpriced = [
            info.instance_type for info in infos if info.hourly_usd is None and info.instance_type not in spot_usd
        ]
        if unpriced:
            raise ConfigError(f"{catalogue.explain(unpriced[0])}, or leave it out of --menu")
    else:
        infos = [info for info in catalogue.types() if is_on_default_menu(info)]
        infos += [info for info in spot_infos if info not in infos]
        unknown = ", ".join(
            info.instance_type for info in catalogue.types() if info.hourly_usd is not None and info.vcpus is None
        )
        if unknown and infos:
            logger.warning("the plan leaves out %.200s: the number of vCPUs is not known", unknown)
        elif unknown:
            # Name the types that have a price but no vCPUs. The error once said that no type has a price.
            raise ConfigError(
                f"the number of vCPUs of {unknown:.200} is not known, and no other type without accelerators has a "
                "price\n  to do: check the names with hetero prices list"
            )
        elif not infos:
            raise ConfigError(
                "no instance type without accelerators has a price, so there is nothing to choose from\n"
                "  to do: give prices with --price TYPE=USD, --price-file FILE or --price-profile NAME. "
                "Burstable and flex types count only if --menu names them"
            )
    # A type that has only a spot price is a spot machine below.
    machines = [machine for info in infos if (machine := Machine.from_info(info)).hourly_usd is not None]
    spots = [
        replace(Machine.from_info(info), hourly_usd=usd, is_spot=True)
        for info, usd in zip(spot_infos, spot_usd.values(), strict=True)
    ]
    return (*machines, *spots)


def _with_vcpus(catalogue: Catalogue, name: str) -> InstanceTypeInfo:
    """Return the facts of a type.

    Raises:
        ConfigError: If the type or its number of vCPUs is unknown, because a price alone does not help a plan.
    """
    # The name of an unknown type is followed by a similar known name, for the message.
    info = catalogue.find(name) or InstanceTypeInfo(instance_type=f"{name}{catalogue.suggestion(name)}")
    # Call this only for its check of the vCPUs.
    Machine.from_info(info)
    return info


def bigger_machines(catalogue: Catalogue, trainer: Machine) -> tuple[Machine, ...]:
    """Return priced machines of the trainer's family with the same accelerators and more vCPUs."""
    if not trainer.num_accelerators:
        return ()
    infos = (info for info in catalogue.types() if family_of(info.instance_type) == trainer.family)
    return tuple(
        Machine.from_info(info)
        for info in infos
        if info.hourly_usd is not None
        and (info.vcpus or 0) > trainer.vcpus
        and (info.num_accelerators, info.accelerator) == (trainer.num_accelerators, trainer.accelerator)
    )
