"""``hetero study``: execute runs that a file plans as a table, and compare them."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from hetero.cli.arguments import Subparsers, add_list, pairs
from hetero.cli.interrupts import run_interruptible
from hetero.cli.output import say

__all__ = ["add"]


def add(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "study", allow_abbrev=False, help="execute runs that vary by a plan, and compare their time, cost and quality"
    )
    parser.add_argument("study", type=Path, metavar="STUDY.yaml", help="the study, see docs/studies.md")
    parser.add_argument(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="folder of the ledger, the runs and the results. The same folder again continues a study. Default: a "
        "folder in studies/",
    )
    parser.add_argument("--dry-run", action="store_true", help="show runs, findings and expected cost, and run nothing")
    add_list(parser, "--only", "FACTOR=LEVEL", "run only the runs with this level. Repeat for several factors")
    parser.add_argument(
        "--replicates", type=int, metavar="N", help="runs per combination of levels, instead of the number in the file"
    )
    parser.add_argument("--fresh", action="store_true", help="forget the runs of earlier starts")
    parser.add_argument("--retry-failed", action="store_true", help="run the runs again that failed")
    add_list(
        parser,
        "--ignore",
        "NUMBER",
        "go on although this check, such as ST-03, found an error. Repeat for several checks",
    )
    parser.set_defaults(run=functools.partial(run_interruptible, _run))


def _run(namespace: argparse.Namespace) -> int:
    """Check and run the study of a file, and write its results. With ``--dry-run``, only show its plan."""
    import logging

    from hetero.decide.studies import study as studies
    from hetero.decide.studies.runs import Executor
    from hetero.system import extensions, logs

    logs.setup_logging(group="study", host="", role="")
    levels = dict(pairs("--only", namespace.only, "FACTOR=LEVEL"))
    preparation = studies.prepare_study(namespace.study, levels=levels, replicates=namespace.replicates)
    study = preparation.plan.study
    make_executor = extensions.find(extensions.EXECUTORS, study.executor.kind) or studies.make_executor
    executor: Executor = make_executor(study, preparation.catalogue)
    # Show the preview before the checks, because a user also needs it if a check finds an error.
    if namespace.dry_run:
        say(studies.preview_text(preparation, executor))
    # `check` raises if the plan of the study has an error, `check_start` if a file that a run needs is missing. A dry
    # run makes both checks too, because it must show whether the study can run.
    preparation.check(namespace.ignore)
    preparation.check_start()
    if namespace.dry_run:
        return 0
    logger = logging.getLogger(__name__)
    for finding in preparation.findings:
        logger.warning("%s", finding)
    folder = namespace.output_dir or studies.default_folder(study)
    results = studies.run_study(
        preparation,
        folder,
        executor=executor,
        fresh=namespace.fresh,
        retry_failed=namespace.retry_failed,
        on_progress=lambda progress: logger.info("%s", studies.progress_text(progress)),
    )
    say(studies.results_text(preparation.plan, results))
    logger.info("results: %s", folder / "study.html")
    return studies.exit_code_of(results)
