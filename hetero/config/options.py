"""The options of a job, and the rules for their values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.errors import ConfigError
from hetero.system.scripts import script_words

__all__ = ["DATA_SERVICES", "FRAMEWORKS", "LOG_LEVELS", "LaunchOptions", "base_type", "framework_of", "kind_text"]

DATA_SERVICES = ("grpc", "tf")
FRAMEWORKS = ("torch", "tensorflow")
LOG_LEVELS = ("debug", "info", "warning", "error")

_KINDS = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "Path": "a path",
    "tuple[str, ...]": "a list of texts",
}


def _option(
    default: object = dataclasses.MISSING,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] = (),
    flag: str = "",
    short: str = "",
    metavar: str = "",
    shared: bool = False,
) -> Any:
    """Declare an option.

    Args:
        default: Value if no source states one. An option without a default must be stated.
        low: Lowest value allowed.
        high: Highest value allowed.
        above: Value that the option must exceed.
        choices: Allowed values. Empty allows all.
        flag: The option's flag if it is not the name in kebab-case.
        short: A second flag of one letter.
        metavar: How help shows the value if not by its choices.
        shared: Whether the hosts of a job must agree on the value.
    """
    bounds = {"low": low, "high": high, "above": above, "choices": choices}
    metadata = {**bounds, "flag": flag, "short": short, "metavar": metavar, "shared": shared}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Options of `hetero launch` and `hetero simulate`: how to run a job.

    Raises:
        ConfigError: If a value has the wrong type or is out of its bounds.
    """

    script: str = _option()
    """The training script."""
    script_args: tuple[str, ...] = _option(())
    """Arguments of the script: on the command line, everything after SCRIPT."""
    module: bool = _option(False, short="-m")
    """Whether SCRIPT is the name of a Python module, such as package.train, as with ``python -m``."""
    cluster_file: str | None = _option(None, metavar="FILE")
    """Description of the cluster, in the schema of resourceconfig.json. Replaces the platform's description."""
    host: str | None = _option(None, metavar="NAME")
    """This host's name in the description of the cluster."""
    roles: tuple[str, ...] = _option((), flag="--role", metavar="GROUP=ROLE")
    """What a group does, data or trainer, if its name and type do not show it. Repeat for each group."""
    nproc_per_node: int | None = _option(None, low=1, high=1024, metavar="N")
    """Ranks per trainer host, 1 to 1024. The default is 1, and with torch one per GPU."""
    framework: str | None = _option(None, choices=FRAMEWORKS, shared=True)
    """Framework of the ranks, by default torch, run by torchrun. With tensorflow, each rank gets a TF_CONFIG."""
    endpoints_per_host: int | None = _option(None, low=1, high=1024, metavar="N")
    """Endpoints per data host, 1 to 1024. The default is one per usable CPU."""
    trainer_endpoints: int = _option(0, low=0, high=1024, metavar="N")
    """Endpoints on every trainer host, beside its ranks, 0 to 1024."""
    data_service: str = _option("grpc", choices=DATA_SERVICES, shared=True)
    """What data hosts run: grpc (endpoints of hetero's data plane) or tf (tf.data.service)."""
    tf_workers_per_host: int = _option(1, low=1, high=1024, metavar="N", shared=True)
    """Workers of tf.data.service per data host, 1 to 1024. Each uses all CPUs of its host."""
    trainer_tf_workers: int = _option(0, low=0, high=1024, metavar="N", shared=True)
    """Workers of tf.data.service on every trainer host, beside its ranks, 0 to 1024."""
    tf_work_dir: Path | None = _option(None, metavar="DIR")
    """Folder for the journal of tf.data.service's dispatcher. A restarted dispatcher continues from it."""
    port: int = _option(17170, low=1, high=65535)
    """Port of every launcher's control service, 1 to 65535. Endpoints choose free ports."""
    start_timeout_s: float = _option(900.0, above=0, high=86400, flag="--start-timeout", metavar="SECONDS")
    """Time to wait for the other hosts, at most a day."""
    data_timeout_s: float = _option(300.0, above=0, high=86400, flag="--data-timeout", metavar="SECONDS")
    """Time that a rank waits while no endpoint is left, at most a day."""
    prepare_timeout_s: float = _option(600.0, above=0, high=86400, flag="--prepare-timeout", metavar="SECONDS")
    """Time limit for the construction of a data set, at most a day."""
    max_batch_bytes: int = _option(2**30, low=1024, high=2**36, metavar="BYTES", shared=True)
    """Largest size of a batch from an endpoint, 1 KiB to 64 GiB. All sides reject larger batches."""
    endpoint_restarts: int = _option(20, low=0, high=1_000_000, metavar="N")
    """Number of crashed endpoints that a host restarts, 0 or more. An hour without a crash gives one back."""
    job_restarts: int = _option(0, low=0, high=1_000_000, metavar="N", shared=True)
    """Number of restarts of the trainer group from its checkpoint after a rank has failed, 0 or more."""
    emulate_sample_s: float | None = _option(
        None, above=0, high=3600, flag="--emulate-sample-seconds", metavar="SECONDS", shared=True
    )
    """Time that every sample costs one emulated vCPU, at most an hour. Results are labelled simulated."""
    emulate_step_s: float | None = _option(None, low=0, high=3600, flag="--emulate-step-seconds", metavar="SECONDS")
    """Time that the compute of every step takes, as a wait, at most an hour. Results are labelled simulated."""
    emulate_vcpus: int | None = _option(None, low=1, high=4096, metavar="N")
    """vCPUs that this host emulates while samples are emulated, 1 to 4096."""
    require_token: bool = _option(False)
    """Whether a job without a token fails instead of logging a warning."""
    tls_dir: Path | None = _option(None, metavar="DIR")
    """Folder with ca.pem, HOST.pem and HOST.key from hetero certs. All connections of hetero then use mutual TLS."""
    purity_checks: int = _option(2, low=0, high=1_000_000, metavar="N")
    """Number of first batches of each loader that are computed twice and compared, 0 or more."""
    warmup_steps: int = _option(10, low=0, high=1_000_000, metavar="N")
    """Number of first steps that measurements leave out, 0 or more."""
    audit: bool = _option(False)
    """Whether every rank records a digest of each batch that it gets, for comparison with hetero audit."""
    output_dir: Path | None = _option(None, metavar="DIR")
    """Folder for the report and the hosts' folders."""
    region: str = _option("us-east-1", metavar="NAME")
    """Region whose prices are used."""
    price_profile: str | None = _option(None, metavar="NAME")
    """Name of prices that hetero contains, for example seed-2022."""
    price_file: Path | None = _option(None, metavar="FILE")
    """File with prices in YAML or JSON. They override the profile."""
    prices: tuple[str, ...] = _option((), flag="--price", metavar="TYPE=USD")
    """USD per hour of an instance type. Overrides the file. Repeat for each type."""
    sigterm_ok: bool = _option(False)
    """Whether a job that stopped on request exits with 0 instead of 143."""
    allow_faults: bool = _option(False)
    """Whether HETERO_FAULTS, which makes processes fail on purpose, has an effect outside of simulations."""
    log_level: str = _option("info", choices=LOG_LEVELS)
    """Lowest level of the messages that are shown."""

    @property
    def command(self) -> list[str]:
        """The script and its arguments, in the form that follows ``python`` on a command line."""
        return [*script_words(self.script, is_module=self.module), *self.script_args]

    def shared(self) -> dict[str, str]:
        """Return the options, by name, that must be equal on all hosts of a job."""
        fields = (field for field in dataclasses.fields(self) if field.metadata["shared"])
        return {field.name: str(getattr(self, field.name)) for field in fields}

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name))
        if not self.script:
            raise ConfigError("no training script is given; expected its path after the options")
        _check_data_service(self)


def framework_of(options: LaunchOptions) -> str:
    """Return the framework of a job's ranks, one of `FRAMEWORKS`."""
    return options.framework or ("tensorflow" if options.data_service == "tf" else "torch")


def base_type(field: dataclasses.Field[Any]) -> str:
    """Return the name of a field's type, without ``| None``."""
    return str(field.type).removesuffix(" | None")


def kind_text(field: dataclasses.Field[Any]) -> str:
    """Return a description of a field's values with their bounds: ``a whole number, 1 or more and at most 8``."""
    meta = field.metadata
    if meta.get("choices"):
        return f"one of {', '.join(meta['choices'])}"
    bounds = (
        (meta.get("low"), "{:g} or more"),
        (meta.get("above"), "greater than {:g}"),
        (meta.get("high"), "at most {:g}"),
    )
    said = " and ".join(form.format(bound) for bound, form in bounds if bound is not None)
    return f"{_KINDS[base_type(field)]}{', ' if said else ''}{said}"


def _check(field: dataclasses.Field[Any], value: object) -> None:
    """Raise if a value breaks the rules of its field."""
    if value is None and str(field.type).endswith("| None"):
        return
    if not _has_type(base_type(field), value) or not _is_within(field.metadata, value):
        raise ConfigError(f"{field.name} is {value!r}; expected {kind_text(field)}")


def _check_data_service(options: LaunchOptions) -> None:
    """Raise if options are stated that the data service of the data hosts cannot use."""
    if options.data_service == "tf":
        if options.require_token or options.tls_dir is not None:
            raise ConfigError(
                "data_service is 'tf', which has neither tokens nor TLS: whoever reaches its ports can use them\n"
                "  Leave out require_token and tls_dir, and let nobody else into the network of the job; or use grpc."
            )
        if options.emulate_sample_s is not None:
            raise ConfigError("emulate_sample_s needs data_service 'grpc': TensorFlow's workers emulate no vCPUs")
        if options.endpoints_per_host is not None or options.trainer_endpoints:
            raise ConfigError(
                "endpoints_per_host and trainer_endpoints are for data_service 'grpc'; "
                "with 'tf' give tf_workers_per_host and trainer_tf_workers"
            )
    elif options.tf_workers_per_host != 1 or options.trainer_tf_workers or options.tf_work_dir is not None:
        raise ConfigError("tf_workers_per_host, trainer_tf_workers and tf_work_dir need data_service 'tf'")


def _has_type(name: str, value: object) -> bool:
    match name:
        case "float":
            return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "bool":
            return isinstance(value, bool)
        case "Path":
            return isinstance(value, Path)
        case "str":
            return isinstance(value, str)
        case _:
            return isinstance(value, tuple) and all(isinstance(item, str) for item in value)


def _is_within(bounds: Mapping[str, Any], value: Any) -> bool:
    low, above, high = bounds.get("low"), bounds.get("above"), bounds.get("high")
    choices: tuple[str, ...] = bounds.get("choices", ())
    if choices:
        return value in choices
    return (low is None or value >= low) and (above is None or value > above) and (high is None or value <= high)
