"""Catalogue of instance types, with their facts and with prices from the user.

hetero ships facts (vCPUs, memory, accelerators, network), but no current prices, because prices differ by region and
change. A price comes from the user's ``--price TYPE=USD``, from a price file, or from a shipped price profile. The
first of these sources that has a price of the type wins. A price file is JSON or YAML::

    region: eu-west-1              # optional, like as_of and source
    as_of: 2026-03-01
    source: our contract
    hourly_usd:
      ml.c5.9xlarge: 1.93
    overrides:                     # optional; these prices replace those above, and hetero prices refresh keeps them
      ml.g5.xlarge: 1.2
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero.documents.files import parse_yaml, read_bounded
from hetero.documents.text import printable
from hetero.errors import ConfigError
from hetero.pricing.instance_types import InstanceTypeInfo, Price, data_folder, shipped_types, stated_resources

__all__ = ["MAX_HOURLY_USD", "Catalogue", "parse_prices", "read_price_file"]

MAX_HOURLY_USD = 1000.0
"""Upper bound of a price. No instance costs this much an hour, so a larger value has a misplaced decimal point."""
_PREFIX, _SUFFIX = "prices_", ".json"
# A name may also state the resources of a host: CPU:16, n1-standard-16+GPU:4.
_NAME = re.compile(r"[A-Za-z0-9.:+_-]{1,64}")


class Catalogue:
    """Immutable catalogue of instance types by name. `load` makes one."""

    def __init__(self, infos: Mapping[str, InstanceTypeInfo]) -> None:
        self._infos = dict(infos)

    @classmethod
    def load(
        cls,
        profile: str | None = None,
        *,
        region: str | None = None,
        price_file: str | Path | None = None,
        overrides: Sequence[str] = (),
    ) -> Catalogue:
        """Read the shipped instance types and add prices to them.

        Args:
            profile: Name of a shipped price profile, see `profiles`. None adds no prices.
            region: Region of the job. Prices that are stated for another region are rejected.
            price_file: JSON or YAML file. Its prices replace those of the profile.
            overrides: Texts ``TYPE=USD``, as given to ``--price``. They replace the prices of the file.

        Raises:
            ConfigError: If the profile is unknown, the file is unreadable or malformed, or a price is not
                in (0, 1000) or is for another region. The message names the file and the key.
        """
        # Collect the prices, from the weakest source to the strongest.
        infos = shipped_types()
        prices: dict[str, Price] = {}
        if profile is not None:
            if profile not in (known := cls.profiles()):
                raise ConfigError(f"price profile {profile!r} is unknown; expected one of {', '.join(known)}")
            text = data_folder().joinpath(f"{_PREFIX}{profile}{_SUFFIX}").read_text(encoding="utf-8")
            prices.update(parse_prices(json.loads(text), where=f"profile {profile}", region=region))
        if price_file is not None:
            content = read_price_file(Path(price_file))
            prices.update(parse_prices(content, where=str(price_file), region=region))
        for override in overrides:
            name, price = _parse_override(override, region)
            prices[name] = price
        # Add the prices. A priced type that is not shipped gets an entry without facts.
        for name, price in prices.items():
            info = _find(infos, name) or InstanceTypeInfo(instance_type=name)
            infos[name] = dataclasses.replace(info, price=price)
        return cls(infos)

    @staticmethod
    def profiles() -> tuple[str, ...]:
        """Return the names of the shipped price profiles."""
        names = (entry.name for entry in data_folder().iterdir())
        return tuple(sorted(name[len(_PREFIX) : -len(_SUFFIX)] for name in names if name.startswith(_PREFIX)))

    def types(self) -> tuple[InstanceTypeInfo, ...]:
        """Return all types in the order of the catalogue (by family, then size)."""
        return tuple(self._infos.values())

    def find(self, instance_type: str) -> InstanceTypeInfo | None:
        """Return a type, or None if it is unknown. `explain` returns a hint for that case.

        ``CPU:16`` and ``GPU:8`` have the facts that they state. ``n1-standard-16+GPU:4`` has the facts of
        ``n1-standard-16``, and four accelerators.
        """
        return _find(self._infos, instance_type)

    def get(self, instance_type: str) -> InstanceTypeInfo:
        """Return a type.

        Raises:
            ConfigError: If the type is unknown. The message lists the closest known names.
        """
        info = self.find(instance_type)
        if info is None:
            raise ConfigError(
                f"instance type {instance_type!r} is not in the catalogue{self.suggestion(instance_type)}\n"
                "  to do: see `hetero prices list`, or add the type with --price TYPE=USD or --price-file FILE"
            )
        return info

    def hourly_usd(self, hosts: Iterable[tuple[str, int]]) -> float | None:
        """Return the price of hosts per hour, or None if a price is unknown.

        Args:
            hosts: Instance types with their numbers of hosts.
        """
        total_usd = 0.0
        for instance_type, count in hosts:
            info = self.find(instance_type)
            if info is None or info.hourly_usd is None:
                return None
            total_usd += info.hourly_usd * count
        return total_usd

    def explain(self, instance_type: str) -> str | None:
        """Return one line that explains why a type lacks a price and how to add one. None if it has a price."""
        info = self.find(instance_type)
        if info is not None and info.price is not None:
            return None
        hint = self.suggestion(instance_type) if info is None else ""
        return f"no price for {instance_type}; pass --price {instance_type}=USD{hint}"

    def suggestion(self, instance_type: str) -> str:
        """Return the hint `` (did you mean ...?)`` with the known types closest to an unknown one, or an empty text."""
        close = difflib.get_close_matches(instance_type.lower(), self._infos, n=2, cutoff=0.75)
        return f" (did you mean {' or '.join(close)}?)" if close else ""


def read_price_file(path: Path) -> object:
    """Return the content of a price file, which `parse_prices` then checks.

    Raises:
        ConfigError: If the file cannot be read, is too large, or is not valid JSON. If its name ends in ``.yaml`` or
            ``.yml``, it must be valid YAML instead.
    """
    content = read_bounded(path, f"price file {path}")
    if path.suffix in (".yaml", ".yml"):
        return parse_yaml(content, f"price file {path}")
    try:
        return json.loads(content)
    # Deeply nested JSON raises RecursionError.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"price file {path}: not valid JSON: {error}") from error


def parse_prices(content: object, *, where: str, region: str | None) -> dict[str, Price]:
    """Return the prices that a price file states, by instance type.

    Args:
        content: Untrusted content of the file.
        where: Origin of the content, for messages.
        region: Region of the job. None accepts prices of any region.

    Raises:
        ConfigError: If the content is malformed, a price is not in (0, 1000), or the prices are for another region.
    """
    # Check the form of the document.
    if not isinstance(content, dict) or not isinstance(content.get("hourly_usd"), dict):
        raise ConfigError(f"{where}: hourly_usd: expected an object from instance type to USD, as in {{'ml.x': 1.5}}")
    unknown = [key for key in content if key not in ("region", "as_of", "source", "hourly_usd", "overrides")]
    if unknown:
        expected = "region, as_of, source, hourly_usd or overrides"
        raise ConfigError(f"{where}: {_show(unknown[0])}: unknown key; expected {expected}")
    overrides = content.get("overrides") or {}
    if not isinstance(overrides, dict):
        raise ConfigError(f"{where}: overrides: expected an object from instance type to USD, as in {{'ml.x': 1.5}}")
    stated: dict[str, str | None] = {key: _parse_text(content, key, where) for key in ("region", "as_of", "source")}
    # Prices differ by region, so this is an error and no warning.
    if region is not None and stated["region"] not in (None, region):
        raise ConfigError(f"{where}: region: found prices of {stated['region']}, but the job runs in {region}")
    # Read the prices. An override replaces a price of the same name.
    prices = {
        _parse_name(name, where, "hourly_usd"): Price(
            hourly_usd=_parse_usd(value, f"{where}: hourly_usd.{name}"),
            region=stated["region"] or region,
            as_of=stated["as_of"],
            source=stated["source"] or where,
        )
        for name, value in content["hourly_usd"].items()
    }
    for name, value in overrides.items():
        usd = _parse_usd(value, f"{where}: overrides.{name}")
        price = Price(hourly_usd=usd, region=stated["region"] or region, source=f"{where}: overrides")
        prices[_parse_name(name, where, "overrides")] = price
    return prices


def _find(infos: Mapping[str, InstanceTypeInfo], instance_type: str) -> InstanceTypeInfo | None:
    """Return the facts of a type, also if its name states resources (``CPU:16``) or attached accelerators.

    An example of attached accelerators is ``n1-standard-16+GPU:4``.
    """
    info = infos.get(instance_type) or stated_resources(instance_type)
    if info is not None:
        return info
    machine, _, resources = instance_type.partition("+")
    base, stated = infos.get(machine), stated_resources(resources)
    if base is None or stated is None or not stated.num_accelerators:
        return None
    # If the name states the accelerators that the type has anyway, the facts and the price are those of the type.
    if stated.num_accelerators == base.num_accelerators:
        return dataclasses.replace(base, instance_type=instance_type)
    # With other accelerators, their kind and the price are not known.
    return dataclasses.replace(
        base,
        instance_type=instance_type,
        num_accelerators=stated.num_accelerators,
        accelerator=None,
        accelerator_memory_gib=None,
        price=None,
    )


def _parse_name(name: object, where: str, key: str) -> str:
    """Return the name of an instance type, or raise `ConfigError` if it is not one."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: {key}: found {_show(name)!r}, expected an instance type of letters, digits, . : + _ -"
        )
    return name


def _show(key: object) -> str:
    return printable(str(key), max_chars=60)


def _parse_text(content: dict[Any, Any], key: str, where: str) -> str | None:
    """Return the text of a key, None without the key. Raise `ConfigError` if the value is not a short text."""
    value = content.get(key)
    # YAML turns dates and years into these types.
    if isinstance(value, (dt.date, int)) and not isinstance(value, bool):
        value = str(value)
    if value is not None and not (isinstance(value, str) and len(value) <= 200 and value.isprintable()):
        raise ConfigError(f"{where}: {key}: found {value!r:.60}, expected a short string")
    return value


def _parse_usd(value: object, where: str) -> float:
    """Return a price in USD per hour, or raise `ConfigError` if the value is not one."""
    # True is an int in Python.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{where}: found {value!r:.60}, expected USD per hour as a number")
    if not 0 < value < MAX_HOURLY_USD:
        raise ConfigError(f"{where}: found {value!r:.60}, expected USD per hour above 0 and below {MAX_HOURLY_USD:g}")
    return float(value)


def _parse_override(override: str, region: str | None) -> tuple[str, Price]:
    """Return the type and the price of one ``--price TYPE=USD``.

    Raises:
        ConfigError: If the text has another form, or the price is out of its bounds.
    """
    name, separator, text = override.partition("=")
    name = name.strip()
    expected = f"--price {override!r:.80}: expected TYPE=USD, for example ml.c5.xlarge=0.20"
    if not separator or not name:
        raise ConfigError(expected)
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(expected) from None
    usd = _parse_usd(value, f"--price {_parse_name(name, '--price', 'TYPE')}")
    return name, Price(hourly_usd=usd, region=region, source="--price")
