"""``hetero check SCRIPT``: finds what would go wrong, or differ, on data hosts. No job is started.

check.py     starts `run` in another process, waits for it, and returns what it found
run.py       runs the script in that process as a rank whose batches come from endpoints, and records findings
session.py   takes the place of a launcher in that process: starts two endpoints, and ends passes early
source.py    searches the script's source for the lines that cause the findings
findings.py  a finding: file, line, what was found, and what to write instead

The script runs as in a job with data hosts, so all checks of such a job apply: globals and batches are compared, each
batch is computed twice, and values that cannot be sent are refused. In addition, passes end after three batches, so the
check also sees later epochs. The endpoints run in an empty folder, where relative paths fail.
"""

from hetero.script_check.check import DEFAULT_SECONDS, check_script
from hetero.script_check.findings import Finding, findings_json, findings_text

__all__ = ["DEFAULT_SECONDS", "Finding", "check_script", "findings_json", "findings_text"]
