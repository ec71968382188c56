"""Options on the command line."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hetero.config.options import LaunchOptions, ReportOptions, base_type
from hetero.errors import ConfigError

__all__ = [
    "MoreWords",
    "add_launch_arguments",
    "add_price_arguments",
    "flag_of",
    "parse",
    "split_at_script",
    "stated_flags",
    "to_flags",
]

_NOT_FLAGS = ("script", "script_args")
_OF_A_CLUSTER = ("platform", "ray_groups", "cluster_file", "host", "join", "join_group")
"""Options that describe a cluster that exists, or one that Ray makes."""
_OF_ONE_LAUNCHER = (*_OF_A_CLUSTER, "output_dir")
"""Options that differ between the launchers of a job."""


class MoreWords(argparse.Action):
    """An option whose value may be several words, which are joined with commas.

    argparse would take SCRIPT for another word. Therefore `split_at_script` joins the words that look like values.

    Args:
        more: Pattern of a further word.
        kwargs: Arguments of argparse's action.
    """

    def __init__(self, *, more: re.Pattern[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.more = more

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Store the words."""
        setattr(namespace, self.dest, values)


def add_launch_arguments(parser: argparse.ArgumentParser, *, makes_cluster: bool = False) -> None:
    """Add every launch option, and the script, to a parser.

    The parsed values are texts, or None if not given. `resolve_options` converts them.

    Args:
        parser: Parser that receives the options.
        makes_cluster: Whether the command makes the cluster. Options that describe an existing cluster are then left
            out.
    """
    helps = _attribute_docstrings()
    script_help = (
        f"{helps['script']} All arguments after SCRIPT go to the script, also options. If HETERO_SCRIPT names the "
        "script, its arguments come after two separators: -- -- data/ --lr 1."
    )
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help=script_help)
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with options by name, for example endpoints_per_host: 8."
    )
    left_out = (*_NOT_FLAGS, *_OF_A_CLUSTER) if makes_cluster else _NOT_FLAGS
    of_report = {field.name for field in dataclasses.fields(ReportOptions)}
    # A class has the fields of its base first. In the help, the options of the report come last.
    for field in sorted(dataclasses.fields(LaunchOptions), key=lambda field: field.name in of_report):
        if field.name not in left_out:
            _add(parser, field, help_text=helps[field.name])


def add_price_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options about prices of instance types. `resolve_prices` converts their values."""
    helps = _attribute_docstrings()
    for field in dataclasses.fields(ReportOptions):
        # The plan is the only option of a report that is not about prices.
        if field.name != "plan":
            _add(parser, field, help_text=helps[field.name])


def split_at_script(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate hetero's arguments from the script's, which are all arguments after SCRIPT.

    As with ``python`` and ``torchrun``, options of the command come before SCRIPT:

    - ``--port 1 train.py --lr 1``. The script gets ``--lr 1``. One ``--`` right before SCRIPT and one after it are
      dropped.
    - ``--port 1 -- --lr 1`` and ``--port 1 -- -- data/``. An option or a second ``--`` follows the first ``--``, so the
      line names no script. The environment or a hyperparameter names it. The script gets ``--lr 1``, or ``data/``.
    - ``-mpackage.train`` means ``-m package.train``.

    Args:
        parser: Parser of the whole command line.
        arguments: Arguments without the program's name.

    Returns:
        The command with its options and SCRIPT, for `parse`, and the script's arguments. A command that takes no script
        keeps all arguments.
    """
    # argparse.REMAINDER does not do this. If an option comes first, argparse decides that the optional SCRIPT is
    # absent, and gives the script the option and all words after it.
    words = list(arguments)
    chosen = _chosen_command(parser, words)
    if chosen is None or all(action.dest != "script" for action in chosen[1]._actions):
        return words, []
    at, command = chosen
    # An option without a value, such as --json, has ``nargs`` 0 in argparse.
    takes_value = {name: action.nargs is None for action in command._actions for name in action.option_strings}
    more_patterns = {
        name: action.more
        for action in command._actions
        if isinstance(action, MoreWords)
        for name in action.option_strings
    }
    # Find the first word that is neither an option of the command nor an option's value.
    at += 1
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-", "--"):
        # Divide -mpackage.train into -m and SCRIPT. The options end after -m.
        if words[at].startswith("-m") and words[at] not in takes_value:
            words[at : at + 1] = ["-m", words[at].removeprefix("-m")]
            at += 1
            break
        # Join the words of one value with commas, as in --fractions 1% 2% 3%, because argparse would take the second
        # word for SCRIPT. The next word belongs to the value if it matches the option's pattern.
        while words[at] in more_patterns and at + 2 < len(words) and more_patterns[words[at]].fullmatch(words[at + 2]):
            words[at + 1 : at + 3] = [f"{words[at + 1]},{words[at + 2]}"]
        at += 2 if takes_value.get(words[at], False) else 1
    own_words, rest = words[:at], words[at:]
    if rest[:1] == ["--"]:
        rest = rest[1:]
        # The line names no script if a second separator or an option follows. Then all that follows is for the script.
        if rest[:1] == ["--"]:
            return own_words, rest[1:]
        if rest[:1] and rest[0].startswith("-") and rest[0] != "-":
            return own_words, rest
    # Otherwise the first word of `rest` is SCRIPT. Without any word, no script is given.
    script, script_args = rest[:1], rest[1:]
    if script_args[:1] == ["--"]:
        script_args = script_args[1:]
    return [*own_words, *script], script_args


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. Unknown flags fail with a suggestion.

    Raises:
        ConfigError: If there are flags or arguments that the parser does not know.
    """
    namespace, unknown = parser.parse_known_args(arguments)
    flags = [text.partition("=")[0] for text in unknown if text.startswith("-")]
    takes_script = "script" in namespace
    # Only commands with the options of a launcher have --config. Those that make a cluster lack these two flags.
    if flags and "config" in namespace and flags[0] in ("--cluster-file", "--host"):
        groups = ", and give --group NAME=TYPE:COUNT for each group" if "group" in namespace else ""
        raise ConfigError(
            f"{flags[0]} describes a cluster that exists, but this command makes its own\n"
            f"  to do: leave out {flags[0]}{groups}; or use hetero launch"
        )
    if flags:
        known = _known_flags(parser, arguments)
        # Prefer a flag that begins with the unknown one. By its letters, --nproc is closer to --price than to
        # --nproc-per-node.
        longer = [name for name in known if name.startswith(flags[0])]
        close = longer or difflib.get_close_matches(flags[0], known, n=1)
        hint = f"did you mean {close[0]}?" if close else "see --help."
        of_script = " Options of the script come after SCRIPT." if takes_script else ""
        raise ConfigError(f"unknown flag {flags[0]}; {hint}{of_script}")
    if unknown:
        raise ConfigError(f"unexpected argument {unknown[0]!r}; see --help")
    return namespace


def to_flags(options: LaunchOptions) -> list[str]:
    """Return the flags that pass these options to the launchers of a job.

    The flags leave out the script and its arguments, and options that differ between hosts: the description of the
    cluster, the host and the output folder. They include defaults, which the launcher's environment must not override.
    """
    fields = (field for field in dataclasses.fields(options) if field.name not in (*_NOT_FLAGS, *_OF_ONE_LAUNCHER))
    return stated_flags({field.name: getattr(options, field.name) for field in fields})


def stated_flags(values: Mapping[str, object]) -> list[str]:
    """Return the flags that set options, for example ``--port=17170``. Options that are None are left out.

    Args:
        values: Value of each option by its name. A list or tuple becomes one flag for each item.

    Raises:
        ConfigError: If a name does not belong to a flag.
    """
    flags = []
    fields = {field.name: field for field in dataclasses.fields(LaunchOptions) if field.name not in _NOT_FLAGS}
    for name, value in values.items():
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "see hetero launch --help"
            raise ConfigError(f"unknown option {name!r:.80}; {hint}")
        flag = flag_of(fields[name])
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            flags += [f"{flag}={item}" for item in (value if isinstance(value, tuple | list) else (value,))]
    return flags


def flag_of(field: dataclasses.Field[Any]) -> str:
    """Return the flag of a field."""
    return field.metadata["flag"] or "--" + field.name.replace("_", "-")


def _add(parser: argparse.ArgumentParser, field: dataclasses.Field[Any], *, help_text: str) -> None:
    """Add the flag of one option to a parser."""
    names = [flag_of(field)]
    # Accept --start-timeout-s too, because it is the name of the option in a file and in the environment.
    if field.name.endswith("_timeout_s"):
        names.append(names[0] + "-s")
    if field.metadata["short"]:
        names.insert(0, field.metadata["short"])
    # The help of an option without a default value describes the default in words. Write 900.0 as 900.
    has_no_default = field.default is False or field.default in (None, ())
    default = "" if has_no_default else f" Default: {field.default}.".replace(".0.", ".")
    # argparse formats the help with %.
    shown = help_text.replace("``", "").replace("%", "%%") + default
    if base_type(field) == "bool":
        # With None, a flag that is not given differs from a flag that states the default. Other sources may set the
        # option of a flag that is not given.
        parser.add_argument(*names, dest=field.name, action=argparse.BooleanOptionalAction, default=None, help=shown)
    else:
        action = "append" if base_type(field).startswith("tuple") else "store"
        choices = ",".join(field.metadata["choices"])
        metavar = field.metadata["metavar"] or (f"{{{choices}}}" if choices else "N")
        parser.add_argument(*names, dest=field.name, action=action, metavar=metavar, help=shown)


@functools.cache
def _attribute_docstrings() -> dict[str, str]:
    """Return the docstring of each option by name. The docstrings are the help of the options.

    Python discards the docstrings of fields, so they are read from the source: a field, and after it a text.
    """
    classes = [ast.parse(inspect.getsource(kind)).body[0] for kind in (ReportOptions, LaunchOptions)]
    statements = [statement for body in classes if isinstance(body, ast.ClassDef) for statement in body.body]
    return {
        statement.target.id: inspect.cleandoc(text.value.value)
        for statement, text in itertools.pairwise(statements)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def _known_flags(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """Return the flags of the command that the arguments choose."""
    flags = [name for action in parser._actions for name in action.option_strings]
    chosen = _chosen_command(parser, arguments)
    if chosen is None:
        return flags
    at, command = chosen
    return flags + _known_flags(command, arguments[at + 1 :])


def _chosen_command(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[int, argparse.ArgumentParser] | None:
    """Return the position and the parser of the command that the arguments name, or None if they name none.

    A command may contain commands, such as ``render slurm``.
    """
    commands = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not commands:
        return None
    position = next((at for at, text in enumerate(arguments) if text in commands[0]), None)
    if position is None:
        return None
    command: argparse.ArgumentParser = commands[0][arguments[position]]
    inner = _chosen_command(command, arguments[position + 1 :])
    # The position of the inner command counts from the argument after this command.
    return (position, command) if inner is None else (position + 1 + inner[0], inner[1])
