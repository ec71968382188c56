"""``hetero check SCRIPT``: finds what would go wrong, or differ, on data hosts. No job is started.

check.py     starts `run` in another process, waits for it, and returns what it found
run.py       runs the script in that process as a rank whose batches come from endpoints, and records findings
session.py   does there what a launcher does in a job: starts two endpoints in an empty folder, and ends passes early
source.py    searches the script's source for the lines that cause the findings
findings.py  a finding: file, line, what was found, and what to write instead

The script runs as in a job with data hosts, and all checks of such a job apply: globals and batches are compared, each
batch is computed twice, and what cannot travel is refused. In addition, passes end after three batches, because the
loop should come to its second epoch. The endpoints run in an empty folder, where relative paths fail.
"""

from hetero.script_check.check import DEFAULT_SECONDS, check_script
from hetero.script_check.findings import Finding, findings_json, findings_text

__all__ = ["DEFAULT_SECONDS", "Finding", "check_script", "findings_json", "findings_text"]
