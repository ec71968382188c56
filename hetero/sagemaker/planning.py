"""`plan`: return the cheapest instance groups for an estimator's job, or its own groups if data hosts do not pay."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero.cluster import Role
from hetero.cluster.roles import assign_roles
from hetero.config import check_hyperparameters
from hetero.decide.planning.options import PlanOptions
from hetero.decide.planning.plan import make_plan
from hetero.decide.profile import load_any_profile
from hetero.errors import ConfigError
from hetero.metrics.profile.profile import Profile
from hetero.pricing import Catalogue
from hetero.report.plan import Plan
from hetero.sagemaker.preparation.adapters import Adapter, adapter_of
from hetero.sagemaker.request import ONLY_GROUP, RequestGroup

__all__ = ["plan"]

logger = logging.getLogger(__name__)

_FROM_ESTIMATOR = ("trainer_type", "num_trainer_hosts")
_OPTIONS = tuple(field.name for field in dataclasses.fields(PlanOptions) if field.name not in _FROM_ESTIMATOR)


def plan(
    estimator: Any,
    profile: Profile | Path | str,
    *,
    roles: Sequence[str] = (),
    region: str | None = None,
    price_profile: str | None = None,
    price_file: Path | str | None = None,
    prices: Sequence[str] = (),
    **options: Any,
) -> list[Any]:
    """Return the instance groups of the best cluster for an estimator's job, and log the reason.

    The number of trainer hosts and the names of their groups stay as the estimator states them. Their type stays too,
    unless a type of its family with more vCPUs is better. If the estimator already has groups of data hosts, the plan
    replaces their types and numbers, and keeps their names, because channels may name these groups. If data hosts do
    not pay, the function returns the groups of trainer hosts alone. The estimator does not change.

    Args:
        estimator: An estimator of SDK 2 or a ``ModelTrainer`` of SDK 3.
        profile: A profile, or the path of ``profile.json``, of a finished run's ``report.json``, or of a folder with
            one of them.
        roles: Roles of groups, each ``GROUP=data`` or ``GROUP=trainer``, as for `hetero launch`. An estimator of
            `prepare` has them already.
        region: AWS region of the prices. None means the region of the estimator's session.
        price_profile: Name of a price list that is part of hetero.
        price_file: YAML or JSON file with prices. They replace those of the price list.
        prices: Texts ``TYPE=USD``. They replace the prices of the file.
        options: Other options of the plan, by the names of `hetero.decide.planning.PlanOptions`.

    Returns:
        Groups of the SDK's class ``InstanceGroup``, with the trainer hosts first.

    Raises:
        ConfigError: If the object is not an estimator, its trainer groups have several types, a price is missing, the
            profile was measured on another type, or an option is unknown or malformed.
        ClusterError: If the role of a group is unclear.
    """
    # Read the estimator and the prices, and make the plan.
    adapter = adapter_of(estimator)
    trainers, data = _groups_by_role(adapter, roles)
    catalogue = Catalogue.load(
        profile=price_profile,
        region=region or getattr(estimator.sagemaker_session, "boto_region_name", None),
        price_file=price_file,
        overrides=_texts("prices", prices, "texts such as 'ml.c5.9xlarge=1.8'"),
    )
    measured = _profile_of(profile, catalogue)
    found = make_plan(measured, catalogue, _options_of(options, trainers))
    _log(found)
    if _uses_spot_instances(estimator):
        logger.warning(
            "the estimator uses spot instances, but the plan counts the prices as given; if they are on-demand prices, "
            "give the spot prices of all types as prices=['TYPE=USD', ...]"
        )
    # Convert the plan's groups. The trainer groups keep their names and numbers, and get the type that the plan chose.
    (trainer_type,) = {group.instance_type for group in found.chosen.groups if group.role == Role.TRAINER.value}
    groups = [dataclasses.replace(group, instance_type=trainer_type) for group in trainers]
    names = [group.name for group in data]
    for planned in found.chosen.groups:
        if planned.role == Role.DATA.value:
            name = names.pop(0) if names else _free_name(planned.name, {group.name for group in (*groups, *data)})
            groups.append(RequestGroup(name=name, instance_type=planned.instance_type, count=planned.count))
    if names:
        logger.warning("the plan does not use the groups %s; change channels that name them", ", ".join(names))
    return adapter.make_groups(groups)


def _groups_by_role(adapter: Adapter, roles: Sequence[str]) -> tuple[list[RequestGroup], list[RequestGroup]]:
    """Return the groups of trainer hosts, which have one type, and the groups of data hosts."""
    groups = list(adapter.groups())
    # An estimator without instance groups has one group, with the service's name for it. The plan may add a group of
    # data hosts, and then this group needs a name of its own.
    if [group.name for group in groups] == [ONLY_GROUP]:
        return [dataclasses.replace(groups[0], name="trainer")], []
    # The hyperparameters may state roles. `check_hyperparameters` demands a script, which an estimator may get from
    # `prepare` only later. Any script will do, because only the roles are used.
    stated = check_hyperparameters(
        {"hetero_script": "-", **adapter.hyperparameters()}, source="the estimator's hyperparameters"
    )
    found = assign_roles(
        [(group.name, group.instance_type) for group in groups],
        [*stated.roles, *roles],
        source="the estimator's groups",
    )
    trainers = [group for group, role in zip(groups, found, strict=True) if role is Role.TRAINER]
    types = {group.instance_type: group for group in trainers}
    if len(types) > 1:
        listed = ", ".join(f"{group.name} ({kind})" for kind, group in types.items())
        raise ConfigError(
            f"the trainer groups have {len(types)} instance types: {listed}; expected one type\n"
            "  to do: give the role of each data group, for example roles=['NAME=data']"
        )
    return trainers, [group for group, role in zip(groups, found, strict=True) if role is Role.DATA]


def _options_of(options: dict[str, Any], trainers: Sequence[RequestGroup]) -> PlanOptions:
    """Return the options of the plan. The estimator gives the trainer hosts."""
    for name in options:
        if name in _FROM_ESTIMATOR:
            raise ConfigError(f"{name} is given, but the estimator states it; leave it out")
        if name not in _OPTIONS:
            close = difflib.get_close_matches(name, _OPTIONS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(_OPTIONS)}"
            raise ConfigError(f"unknown option {name!r} of a plan; {hint}")
    if options.get("spot_usd"):
        raise ConfigError(
            "spot_usd is given, but on SageMaker all groups of a job are spot instances, or none\n"
            "  to do: leave it out, or give the spot prices of all types as prices"
        )
    menu = _texts("menu", options.get("menu", ()), "instance types, such as ['ml.c5.9xlarge']")
    return PlanOptions(
        **{**options, "menu": menu},
        trainer_type=trainers[0].instance_type,
        num_trainer_hosts=sum(group.count for group in trainers),
    )


def _profile_of(profile: object, catalogue: Catalogue) -> Profile:
    """Return the caller's profile, or read it from a path. Raise `ConfigError` for an object of another type."""
    if isinstance(profile, Profile):
        return profile
    if not isinstance(profile, (str, Path)):
        raise ConfigError(
            f"profile is {profile!r:.100}; expected a Profile, or the path of profile.json or report.json"
        )
    return load_any_profile(Path(profile), catalogue)


def _texts(name: str, values: object, what: str) -> tuple[str, ...]:
    """Return a list of texts as a tuple. A single text is not a list, although Python can iterate over it."""
    found = None if isinstance(values, (str, Mapping)) or not isinstance(values, Iterable) else tuple(values)
    if found is None or not all(isinstance(value, str) for value in found):
        raise ConfigError(f"{name} is {values!r:.100}; expected a list of {what}")
    return found


def _uses_spot_instances(estimator: Any) -> bool:
    """Return whether an estimator of SDK 2 or a trainer of SDK 3 asks for spot instances."""
    compute = getattr(estimator, "compute", None)
    is_spot_of_2 = getattr(estimator, "use_spot_instances", False) is True
    is_spot_of_3 = getattr(compute, "enable_managed_spot_training", False) is True
    return is_spot_of_2 or is_spot_of_3


def _free_name(name: str, taken: set[str]) -> str:
    """Return a name for a data group that no other group has: the given name, or else ``data2``, ``data3``, ..."""
    candidates = itertools.chain([name], (f"data{number}" for number in itertools.count(2)))
    return next(candidate for candidate in candidates if candidate not in taken)


def _log(found: Plan) -> None:
    """Log the answer, its notes, and the options that `prepare` needs for it."""
    # A program that has not set up logging shows only warnings. If the plan changes nothing, the user sees no new
    # groups either, so log this answer as a warning.
    is_same = found.chosen.groups == found.baseline.groups
    logger.log(logging.WARNING if is_same else logging.INFO, "%s", found.answer)
    for note in found.notes:
        logger.info("note: %s", note)
    options = {"endpoints_per_host": found.chosen.endpoints_per_host}
    # The plan chooses a number of endpoints on trainer hosts only for a job with data hosts.
    if any(group.role == Role.DATA.value for group in found.chosen.groups):
        options["trainer_endpoints"] = found.chosen.local_endpoints
    options_text = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
    if options_text:
        logger.info("the plan needs these options: prepare(estimator, %s)", options_text)
