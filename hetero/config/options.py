"""The options of a job, and the rules for their values."""

from __future__ import annotations

import dataclasses
import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero.cluster.rendering.request import PORT
from hetero.errors import ConfigError, ExitCode
from hetero.pricing.catalog import MAX_HOURLY_USD
from hetero.system.extensions import DRIVERS, OWN, PLATFORMS
from hetero.system.scripts import script_words

if TYPE_CHECKING:
    from hetero.pricing import Catalogue

__all__ = [
    "AUTO",
    "DATA_SERVICES",
    "DEFAULT_DATA_SERVICE",
    "DEFAULT_WARMUP_STEPS",
    "FRAMEWORKS",
    "LOG_LEVELS",
    "RAY",
    "LaunchOptions",
    "ReportOptions",
    "base_type",
    "framework_of",
    "kind_text",
    "trainer_endpoints_of",
]

DATA_SERVICES = {"grpc": "torch", "tf": "tensorflow"}
"""The data services. For each, the framework of the ranks that use it, unless ``--framework`` names another.

`hetero.launch.data_services` implements them.
"""
AUTO = "auto"
"""Value of an option that the launcher chooses while the job runs."""
DEFAULT_DATA_SERVICE = "grpc"
DEFAULT_WARMUP_STEPS = 10
"""Number of first steps that measurements leave out, both in a job and in a process without a launcher.

At the start, batches that were fetched ahead hide the data wait, and the framework still compiles and tunes. A loader
that fetches more batches ahead needs a larger number.
"""
FRAMEWORKS = ("torch", "tensorflow")
RAY = "ray"
"""Platform on which one command starts all hosts of a job. Its hosts get no description."""
LOG_LEVELS = ("debug", "info", "warning", "error")

_UNPROTECTED = (
    "leave it out, because tf.data.service has neither tokens nor TLS. Every peer that reaches its ports can use it. "
    "Allow only the hosts of the job on its network"
)
_KINDS: dict[str, tuple[str, type | tuple[type, ...]]] = {
    "str": ("a string", str),
    "int": ("a whole number", int),
    "float": ("a number", (int, float)),
    "bool": ("true or false", bool),
    "Path": ("a path", Path),
    "tuple[str, ...]": ("a list of strings", tuple),
}
"""Description and Python types of the values, by the name of a field's type."""


def _option(
    default: object = dataclasses.MISSING,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] = (),
    words: tuple[str, ...] = (),
    flag: str = "",
    short: str = "",
    metavar: str = "",
    shared: bool = False,
    data_service: str = "",
    to_do: str = "",
) -> Any:
    """Declare an option.

    Args:
        default: Value if no source states one. An option without a default must be stated.
        low: Lowest value allowed.
        high: Highest value allowed.
        above: Value that the option must exceed.
        choices: Allowed values. Empty allows all.
        words: Texts that are allowed beside the values of the type. The field's type is then ``TYPE | str``.
        flag: The option's flag if it is not the name in kebab-case.
        short: A second flag of one letter.
        metavar: Name of the value in the help. Empty shows the choices.
        shared: Whether the hosts of a job must agree on the value.
        data_service: The only data service that can use the option. Empty if all can.
        to_do: Advice to a user of another data service, for the error.
    """
    bounds = {"low": low, "high": high, "above": above, "choices": choices, "words": words}
    metadata = {**bounds, "flag": flag, "short": short, "metavar": metavar, "shared": shared}
    metadata |= {"data_service": data_service, "to_do": to_do}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Options that change the report of a job and nothing else: its prices, and the plan that it is compared with.

    Raises:
        ConfigError: If a value has the wrong type or is out of its bounds.
    """

    region: str = _option("us-east-1", metavar="NAME")
    """AWS region whose prices are used."""
    price_profile: str | None = _option(None, metavar="NAME")
    """Name of a price list that is part of hetero, for example seed-2022."""
    price_file: Path | None = _option(None, metavar="FILE")
    """YAML or JSON file with prices. They override those of the profile."""
    prices: tuple[str, ...] = _option((), flag="--price", metavar="TYPE=USD")
    """Price of an instance type in USD per hour. Overrides the price file. Repeat for each type."""
    plan: Path | None = _option(None, metavar="FILE")
    """JSON of hetero plan. The report says how far the plan was from the measured step time."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name))

    def catalogue(self) -> Catalogue:
        """Return the instance types with these prices. See `Catalogue.load`."""
        # Import this here, because ranks import the options, and the import takes 0.1 s.
        from hetero.pricing import Catalogue

        return Catalogue.load(self.price_profile, region=self.region, price_file=self.price_file, overrides=self.prices)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions(ReportOptions):
    """Options of `hetero launch` and `hetero simulate`: how to run a job.

    Raises:
        ConfigError: If a value has the wrong type or is out of its bounds.
    """

    script: str = _option()
    """Path of the training script, or with -m the name of a module."""
    script_args: tuple[str, ...] = _option(())
    """Arguments of the script. On the command line, these are all arguments after SCRIPT."""
    module: bool = _option(False, short="-m")
    """Whether SCRIPT is the name of a Python module, such as package.train, as with ``python -m``."""
    platform: str | None = _option(None, metavar=f"{{{','.join([*OWN[PLATFORMS], *OWN[DRIVERS]])}}}")
    """Platform that describes the job. Default: the one that the environment and files of this host show. With ray,
    this command starts the job on a Ray cluster and follows it."""
    ray_groups: tuple[str, ...] = _option((), flag="--group", metavar="NAME=RESOURCES:COUNT")
    """With --platform ray, a group of the job: trainer=GPU:8:1, or data=CPU:16:2..8 for a number of data hosts that
    follows the demand. Repeat for each group."""
    cluster_file: str | None = _option(None, metavar="FILE")
    """File that describes the cluster, in the schema of resourceconfig.json. Overrides the platform's description."""
    host: str | None = _option(None, metavar="NAME")
    """This host's name in the description of the cluster."""
    join: str | None = _option(None, metavar="HOST:PORT")
    """Any launcher of a running job, which this host joins as a data host. It needs the token of the job."""
    join_group: str | None = _option(None, metavar="NAME[=TYPE]")
    """With --join, the group of this host, and its instance type if the job has no such group. Default: the first data
    group of the job."""
    spot_groups: tuple[str, ...] = _option((), flag="--spot", metavar="GROUP=USD")
    """Group of data hosts that the platform may take away, and the price of one of them in USD per hour. The job starts
    and goes on without them. Repeat for each group."""
    roles: tuple[str, ...] = _option((), flag="--role", metavar="GROUP=ROLE")
    """Role of a group, data or trainer. Needed if its name and instance type do not show it. Repeat for each group."""
    nproc_per_node: int | None = _option(None, low=1, high=1024, metavar="N")
    """Ranks per trainer host, 1 to 1024. Default: with torch one per GPU if there are GPUs, otherwise 1."""
    framework: str | None = _option(None, choices=FRAMEWORKS, shared=True)
    """Framework of the ranks. With torch, they get the variables of torchrun. With tensorflow, each gets a TF_CONFIG.
    Default: torch, and tensorflow with --data-service tf."""
    endpoints_per_host: int | None = _option(
        None, low=1, high=1024, metavar="N", data_service="grpc", to_do="give tf_workers_per_host instead"
    )
    """Endpoints per data host, 1 to 1024. Default: one per usable CPU."""
    trainer_endpoints: int | str = _option(
        AUTO,
        low=0,
        high=1024,
        words=(AUTO,),
        metavar="N|auto",
        data_service="grpc",
        to_do="give trainer_tf_workers instead",
    )
    """Endpoints per trainer host, beside its ranks, 0 to 1024. With auto, a job with data hosts starts with none and
    adds endpoints while they make steps shorter. A job without data hosts, or with TensorFlow's servers, does not."""
    data_service: str = _option(DEFAULT_DATA_SERVICE, choices=tuple(DATA_SERVICES), shared=True)
    """Service that data hosts run: grpc for hetero's endpoints, tf for tf.data.service."""
    tf_workers_per_host: int = _option(1, low=1, high=1024, metavar="N", shared=True, data_service="tf")
    """Workers of tf.data.service per data host, 1 to 1024. Each uses all CPUs of its host."""
    trainer_tf_workers: int = _option(0, low=0, high=1024, metavar="N", shared=True, data_service="tf")
    """Workers of tf.data.service per trainer host, beside its ranks, 0 to 1024."""
    tf_work_dir: Path | None = _option(None, metavar="DIR", data_service="tf")
    """Folder for the journal of tf.data.service's dispatcher. A restarted dispatcher continues from it. Default: no
    journal."""
    port: int = _option(PORT, low=1, high=65535)
    """Port of every launcher's control service, 1 to 65535. Endpoints choose free ports. Under Slurm the default is
    20000 plus the last four digits of the job's number."""
    start_timeout_s: float = _option(900.0, above=0, high=86400, flag="--start-timeout", metavar="SECONDS")
    """Seconds to wait for the other hosts at the start, at most 86400."""
    data_timeout_s: float = _option(300.0, above=0, high=86400, flag="--data-timeout", metavar="SECONDS")
    """Seconds until a rank without any endpoint fails, at most 86400."""
    prepare_timeout_s: float = _option(600.0, above=0, high=86400, flag="--prepare-timeout", metavar="SECONDS")
    """Time limit in seconds for the construction of a data set, at most 86400."""
    max_batch_bytes: int = _option(2**30, low=1024, high=2**36, metavar="BYTES", shared=True)
    """Largest size of a batch from an endpoint in bytes, 1 KiB to 64 GiB. All hosts reject larger batches."""
    endpoint_restarts: int = _option(20, low=0, high=1_000_000, metavar="N")
    """Restarts of crashed endpoints per host, 0 or more. An hour without a crash gives one restart back."""
    job_restarts: int = _option(0, low=0, high=1_000_000, metavar="N", shared=True)
    """Restarts of the trainer group from its checkpoint after a rank has failed, 0 or more."""
    emulate_sample_s: float | None = _option(
        None,
        above=0,
        high=3600,
        flag="--emulate-sample-seconds",
        metavar="SECONDS",
        shared=True,
        data_service="grpc",
        to_do="leave it out, because workers of tf.data.service cannot emulate vCPUs",
    )
    """Seconds that each sample costs one emulated vCPU, at most 3600. Results are labelled simulated."""
    emulate_step_s: float | None = _option(None, low=0, high=3600, flag="--emulate-step-seconds", metavar="SECONDS")
    """Seconds that each step waits in place of its compute, at most 3600. Results are labelled simulated."""
    emulate_vcpus: int | None = _option(None, low=1, high=4096, metavar="N")
    """vCPUs that this host emulates with --emulate-sample-seconds, 1 to 4096. Default: its usable CPUs, and in hetero
    simulate the vCPUs of its instance type."""
    require_token: bool = _option(False, data_service="grpc", to_do=_UNPROTECTED)
    """Whether a job without a token fails instead of logging a warning."""
    tls_dir: Path | None = _option(None, metavar="DIR", data_service="grpc", to_do=_UNPROTECTED)
    """Folder with ca.pem, HOST.pem and HOST.key from hetero certs. All connections of hetero then use mutual TLS."""
    purity_checks: int = _option(2, low=0, high=1_000_000, metavar="N")
    """First batches of each loader that are computed twice and compared, 0 or more."""
    warmup_steps: int = _option(DEFAULT_WARMUP_STEPS, low=0, high=1_000_000, metavar="N")
    """First steps of each loader that measurements leave out, 0 or more."""
    usage_interval_s: float = _option(1.0, low=0.05, high=600, flag="--usage-interval", metavar="SECONDS")
    """Seconds between readings of this host's CPU, memory and GPU use, 0.05 to 600. hetero canary reads more often."""
    profile: bool = _option(False, shared=True)
    """Whether the job only measures itself for at most a minute of training and writes profile.json. It repeats batches
    and writes no checkpoint. See hetero profile."""
    audit: bool = _option(False)
    """Whether every rank records a digest of each batch that it gets, for comparison with hetero audit."""
    output_dir: Path | None = _option(None, metavar="DIR")
    """Folder for the report and the files of hosts. Default: the platform's output folder, and in hetero simulate a
    folder in runs/."""
    sigterm_ok: bool = _option(False)
    """Whether a job that stopped on request exits with 0 instead of 143."""
    allow_faults: bool = _option(False)
    """Whether HETERO_FAULTS has an effect outside of simulations. It makes processes fail on purpose."""
    log_level: str = _option("info", choices=LOG_LEVELS)
    """Lowest level of the log lines that are shown."""

    @property
    def stopped_code(self) -> int:
        """Exit code of a launcher that ends because of a request to stop."""
        return int(ExitCode.OK) if self.sigterm_ok else 128 + signal.SIGTERM

    @property
    def command(self) -> list[str]:
        """The script and its arguments, in the form that follows ``python`` on a command line."""
        return [*script_words(self.script, is_module=self.module), *self.script_args]

    def spot_usd(self, group: str) -> float | None:
        """Return the price of a spot host of a group in USD per hour. None for a group without spot hosts."""
        found = [text.rpartition("=")[2] for text in self.spot_groups if text.rpartition("=")[0] == group]
        return float(found[-1]) if found else None

    def shared(self) -> dict[str, str]:
        """Return the options, by name, that must be equal on all hosts of a job."""
        fields = (field for field in dataclasses.fields(self) if field.metadata["shared"])
        return {field.name: str(getattr(self, field.name)) for field in fields}

    def __post_init__(self) -> None:
        # super() does not work in a dataclass with slots, because the decorator makes another class.
        ReportOptions.__post_init__(self)
        if not self.script:
            raise ConfigError("no training script is given; expected its path after the options")
        _check_data_service(self)
        _check_joining(self)
        if self.ray_groups and self.platform != RAY:
            raise ConfigError("ray_groups are stated, and only --platform ray uses them; leave out --group")
        _check_profile(self)


def framework_of(options: LaunchOptions) -> str:
    """Return the framework of a job's ranks, one of `FRAMEWORKS`."""
    return options.framework or DATA_SERVICES[options.data_service]


def trainer_endpoints_of(options: LaunchOptions, *, has_data_hosts: bool) -> int | None:
    """Return the number of endpoints per trainer host, or None if the job chooses it while it runs.

    ``auto`` chooses a number only in a job with data hosts that run endpoints. In other jobs it means 0. In a profile
    run it means 0 too, because all steps of a measurement must have the same number of endpoints.
    """
    if options.trainer_endpoints != AUTO:
        return int(options.trainer_endpoints)
    can_choose = has_data_hosts and options.data_service == DEFAULT_DATA_SERVICE and not options.profile
    return None if can_choose else 0


def base_type(field: dataclasses.Field[Any]) -> str:
    """Return the name of a field's type, without ``| None``, and without ``| str`` for an option with words."""
    return str(field.type).removesuffix(" | None").removesuffix(" | str")


def kind_text(field: dataclasses.Field[Any]) -> str:
    """Return a description of a field's values with their bounds: ``a whole number, 1 or more and at most 8``."""
    meta = field.metadata
    if meta["choices"]:
        return f"one of {', '.join(meta['choices'])}"
    bounds = ((meta["low"], "{:g} or more"), (meta["above"], "greater than {:g}"), (meta["high"], "at most {:g}"))
    limits = " and ".join(form.format(bound) for bound, form in bounds if bound is not None)
    words = "".join(f", or {word}" for word in meta["words"])
    description, _ = _KINDS[base_type(field)]
    return f"{description}{', ' if limits else ''}{limits}{words}"


def _check(field: dataclasses.Field[Any], value: object) -> None:
    """Raise if a value breaks the rules of its field.

    Raises:
        ConfigError: If the value has the wrong type or is out of its bounds.
    """
    if value is None and str(field.type).endswith("| None"):
        return
    if isinstance(value, str) and value in field.metadata["words"]:
        return
    if not _has_type(base_type(field), value) or not _is_within(field.metadata, value):
        raise ConfigError(f"{field.name} is {value!r}; expected {kind_text(field)}")


def _check_data_service(options: LaunchOptions) -> None:
    """Raise if an option is stated that the data service of the job cannot use."""
    for field in dataclasses.fields(options):
        needed = field.metadata["data_service"]
        # An option that is stated with its default cannot be told from one that is not stated.
        if needed not in ("", options.data_service) and getattr(options, field.name) != field.default:
            to_do = field.metadata["to_do"] or f"leave it out, or give data_service {needed!r}"
            raise ConfigError(
                f"{field.name} needs data_service {needed!r}, found {options.data_service!r}\n  to do: {to_do}"
            )


def _check_joining(options: LaunchOptions) -> None:
    """Raise if an option about hosts that join a job, or that the platform may take away, is malformed."""
    if options.join is not None:
        host, _, port = options.join.rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and 0 < int(port) <= 65535):
            raise ConfigError(f"join is {options.join!r:.100}; expected HOST:PORT of a launcher of the job")
    elif options.join_group is not None:
        raise ConfigError("join_group is stated without join; expected both, or neither")
    for text in options.spot_groups:
        group, equals, usd = text.rpartition("=")
        try:
            is_price = 0 < float(usd) <= MAX_HOURLY_USD
        except ValueError:
            is_price = False
        if not (group and equals and is_price):
            raise ConfigError(
                f"--spot is {text!r:.100}; expected GROUP=USD, a price per hour above 0 and at most {MAX_HOURLY_USD:g}"
            )


def _check_profile(options: LaunchOptions) -> None:
    """Raise if an option is stated that a profile run cannot use."""
    if not options.profile:
        return
    if options.data_service == "tf":
        raise ConfigError(
            "profile is true and data_service is 'tf', whose batches a profile run cannot measure\n"
            "  to do: run the job without --profile, and give its report to hetero plan"
        )
    if options.audit:
        raise ConfigError("profile and audit are both true; leave out audit, because a profile run repeats batches")


def _has_type(name: str, value: object) -> bool:
    """Return whether a value has the type with this name, and is finite if it is a number. See `base_type`."""
    # True is an int in Python.
    if isinstance(value, bool):
        return name == "bool"
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if isinstance(value, tuple) and not all(isinstance(item, str) for item in value):
        return False
    _, python_types = _KINDS[name]
    return isinstance(value, python_types)


def _is_within(bounds: Mapping[str, Any], value: Any) -> bool:
    """Return whether a value obeys the bounds and choices of its field."""
    if bounds["choices"]:
        return value in bounds["choices"]
    low, above, high = bounds["low"], bounds["above"], bounds["high"]
    return (low is None or value >= low) and (above is None or value > above) and (high is None or value <= high)
