"""Deliberate faults: `HETERO_FAULTS` makes this process fail in a deterministic way. For tests, never for jobs.

Rules are separated by ``;``, the parts of a rule by ``:``::

    HETERO_FAULTS="Fetch:unavailable:p=0.1:seed=7;compute:hang:at=50;send:corrupt:p=0.01;heartbeat:delay_s=2"

The first part is the *site*. A word without ``=`` is the *action* (default: ``delay``). Other parts set when the fault
strikes:

- ``at=N``: when this process reaches the site for the N-th time
- ``p=P``: each time with this probability (drawn from ``seed``)
- neither ``at`` nor ``p``: every time
- ``times=N``: at most N times
- ``host=NAME``: only on this host of the job

Sites and their actions:

- ``Prepare``, ``Attend`` (gRPC calls of an endpoint): ``unavailable``, ``delay``
- ``Fetch`` (a request for a batch): ``unavailable`` (ends the connection), ``busy``, ``delay``
- ``compute`` (a piece of the user's work): ``hang`` (for ``delay_s`` or forever), ``kill``, ``delay``
- ``send`` (a batch): ``corrupt`` (flips a bit), ``truncate``, ``delay``
- ``heartbeat`` (of a launcher, to each peer): ``drop``, ``delay``
- ``link`` (of a reader): ``via`` with ``network=A.B.C``, which replaces the first three numbers of an address

Without faults this costs nothing at run time, because each site calls `faults_at` once, at its start, and gets None.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetero.errors import ConfigError

__all__ = ["FAULTS_VARIABLE", "InjectedFault", "Strike", "address_via", "faults_at", "parse_faults", "permit_faults"]

FAULTS_VARIABLE = "HETERO_FAULTS"

_ACTIONS: Mapping[str, tuple[str, ...]] = {
    "Prepare": ("unavailable", "delay"),
    "Attend": ("unavailable", "delay"),
    "Fetch": ("unavailable", "busy", "delay"),
    "compute": ("hang", "kill", "delay"),
    "send": ("corrupt", "truncate", "delay"),
    "heartbeat": ("drop", "delay"),
    "link": ("via",),
}
_HOST_VARIABLE = "HETERO_FAULTS_HOST"
"""Environment variable with the name of the host, for rules with ``host=``. The launcher sets it for its processes."""
_FOR_EVER_S = 1e9

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class InjectedFault:
    """One rule. It counts how often this process reaches the site."""

    site: str
    action: str
    at: int | None = None
    """The fault strikes only when the site is reached for the N-th time, from 1. None: it may strike every time."""
    p: float | None = None
    """Probability in (0, 1]."""
    seed: int = 0
    times: int | None = None
    host: str = ""
    delay_s: float | None = None
    network: str = ""
    _num_passed: int = field(default=0, init=False)
    _num_struck: int = field(default=0, init=False)
    _random: random.Random = field(default_factory=random.Random, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Seed with a text. A hash of a text differs between processes, but the same text always gives the same random
        # numbers.
        self._random.seed(f"{self.site}:{self.action}:{self.seed}")

    def is_due(self) -> bool:
        """Count that the site is reached. Return whether the fault strikes now. Not thread-safe."""
        self._num_passed += 1
        if self.times is not None and self._num_struck >= self.times:
            return False
        is_due = self.at is None or self.at == self._num_passed
        if self.p is not None:
            # Draw a number in any case, because the sequence must depend only on how often the site was reached.
            is_due = self._random.random() < self.p and is_due
        self._num_struck += int(is_due)
        return is_due

    def place(self, size: int) -> int:
        """Return a random offset in [0, size). It is the same in every run."""
        return self._random.randrange(size)


class Strike:
    """The faults of one site in this process. Thread-safe."""

    def __init__(self, faults: Sequence[InjectedFault]) -> None:
        self._faults = tuple(faults)
        self._lock = threading.Lock()

    def __call__(self) -> InjectedFault | None:
        """Count that the site is reached. Delay, hang or kill if due. Return a due fault of another kind, or None."""
        with self._lock:
            due = [fault for fault in self._faults if fault.is_due()]
        left_to_caller = None
        for fault in due:
            if fault.action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            logger.warning("fault on purpose: %s %s", fault.site, fault.action)
            if fault.action in ("delay", "hang"):
                time.sleep(_FOR_EVER_S if fault.delay_s is None else fault.delay_s)
            else:
                left_to_caller = fault
        return left_to_caller


def parse_faults(text: str) -> tuple[InjectedFault, ...]:
    """Return the faults of the rules in `HETERO_FAULTS`, for example ``compute:hang:at=50;send:corrupt:p=0.01``.

    Raises:
        ConfigError: If a rule is malformed. The message names the rule.
    """
    return tuple(_parse_rule(rule.strip()) for rule in text.split(";") if rule.strip())


def faults_at(site: str) -> Strike | None:
    """Return the faults of this process at a site, or None without faults.

    Raises:
        ConfigError: If `HETERO_FAULTS` is malformed.
    """
    here = [fault for fault in _current() if fault.site == site]
    return Strike(here) if here else None


def address_via(address: str) -> str:
    """Return the ``ip:port`` to connect to instead of ``address``, or ``address`` without a ``link:via`` rule.

    Such a rule replaces the first three numbers of an IPv4 address.
    """
    host, _, port = address.rpartition(":")
    for fault in _current():
        if fault.site == "link" and "." in host:
            last_number = host.rpartition(".")[2]
            return f"{fault.network}.{last_number}:{port}"
    return address


def permit_faults(environ: MutableMapping[str, str], *, allow: bool, host: str, platform: str) -> None:
    """Check at a launcher's start that faults are allowed here.

    If they are, pass the host's name to the launcher's processes, for rules with ``host=``.

    Args:
        environ: Environment of this process, which its children inherit.
        allow: Whether ``--allow-faults`` is given. It allows faults on a real cluster.
        host: Name of this host.
        platform: Source of the cluster's description if the cluster is real. Empty for a simulated job.

    Raises:
        ConfigError: If faults are set on a real cluster without ``allow``, or if they are malformed.
    """
    text = environ.get(FAULTS_VARIABLE, "")
    if not text:
        return
    faults = parse_faults(text)
    if platform and not allow:
        raise ConfigError(
            f"{FAULTS_VARIABLE} is set, and this is no simulated job: {platform} describes its cluster\n"
            f"  to do: unset {FAULTS_VARIABLE}; or, if faults are what you want here, say --allow-faults"
        )
    logger.warning("%s is set: this host does wrong on purpose (%d rules)", FAULTS_VARIABLE, len(faults))
    environ[_HOST_VARIABLE] = host


# The results are kept, because all uses of a rule in a process share its counters and its random numbers.
@functools.lru_cache(maxsize=4)
def _parsed(text: str, host: str) -> tuple[InjectedFault, ...]:
    return tuple(fault for fault in parse_faults(text) if fault.host in ("", host))


def _current() -> tuple[InjectedFault, ...]:
    """Return the faults that the environment sets for this host."""
    return _parsed(os.environ.get(FAULTS_VARIABLE, ""), os.environ.get(_HOST_VARIABLE, ""))


def _parse_rule(rule: str) -> InjectedFault:
    """Return the fault of one rule.

    Raises:
        ConfigError: If the rule is malformed.
    """
    site, *parts = (part.strip() for part in rule.split(":"))
    actions = [part for part in parts if "=" not in part]
    texts = dict(part.split("=", 1) for part in parts if "=" in part)
    if site not in _ACTIONS:
        raise _malformed(rule, f"there is no site {site!r}", f"one of {', '.join(_ACTIONS)}")
    if len(actions) > 1:
        raise _malformed(rule, f"there are the actions {' and '.join(actions)}", "one")
    action = actions[0] if actions else "delay"
    if action not in _ACTIONS[site]:
        raise _malformed(rule, f"{site} has no action {action!r}", f"one of {', '.join(_ACTIONS[site])}")
    if action == "delay" and "delay_s" not in texts:
        raise _malformed(rule, "a delay has no length", "delay_s=SECONDS")
    if (action == "via") != ("network" in texts):
        raise _malformed(rule, "via and network= belong together", "link:via:network=127.0.1")
    return InjectedFault(site=site, action=action, **{name: _value(rule, name, text) for name, text in texts.items()})


def _value(rule: str, name: str, text: str) -> Any:
    """Return the value of one part of a rule, converted to its type.

    Raises:
        ConfigError: If the part is unknown or out of range.
    """
    if name not in _VALUES:
        raise _malformed(rule, f"there is no {name!r}", f"some of {', '.join(_VALUES)}")
    convert, is_in_range, expected = _VALUES[name]
    try:
        value = convert(text)
    except ValueError:
        value = None
    if value is None or not is_in_range(value):
        raise _malformed(rule, f"{name} is {text!r}", expected)
    return value


def _network(text: str) -> str:
    """Return three numbers of an IPv4 address unchanged. Raise `ValueError` if a fourth number makes no address."""
    ipaddress.IPv4Address(f"{text}.1")
    return text


# For each part of a rule: its conversion from text, the check of its value, and what is expected, for the message.
_VALUES: Mapping[str, tuple[Callable[[str], Any], Callable[[Any], bool], str]] = {
    "at": (int, lambda value: value >= 1, "a whole number, 1 or more"),
    "p": (float, lambda value: 0 < value <= 1, "a number in (0, 1]"),
    "seed": (int, lambda value: True, "a whole number"),
    "times": (int, lambda value: value >= 1, "a whole number, 1 or more"),
    "host": (str, bool, "a host's name"),
    "delay_s": (float, lambda value: 0 <= value <= 3600, "seconds, at most an hour"),
    "network": (_network, bool, "three numbers of an IPv4 address, such as 127.0.1"),
}


def _malformed(rule: str, found: str, expected: str) -> ConfigError:
    return ConfigError(f"{FAULTS_VARIABLE}: in the rule {rule!r}, {found}; expected {expected}")
