"""The options of a job, from several sources. Each source overrides the sources before it.

The sources are defaults, a file, the environment, hyperparameters and flags, in this order. Every option is one field
of `LaunchOptions`, or of its base `ReportOptions`. The field determines the flag, the environment variable, the
hyperparameter and the key in a file.
"""

from __future__ import annotations

from hetero.config.flags import (
    add_launch_arguments,
    add_price_arguments,
    parse,
    split_at_script,
    stated_flags,
    to_flags,
)
from hetero.config.options import LaunchOptions, ReportOptions, framework_of, trainer_endpoints_of
from hetero.config.resolve import check_hyperparameters, resolve_options, resolve_prices
from hetero.config.timings import Timings

__all__ = [
    "LaunchOptions",
    "ReportOptions",
    "Timings",
    "add_launch_arguments",
    "add_price_arguments",
    "check_hyperparameters",
    "framework_of",
    "parse",
    "resolve_options",
    "resolve_prices",
    "split_at_script",
    "stated_flags",
    "to_flags",
    "trainer_endpoints_of",
]
