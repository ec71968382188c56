"""All subjects together: what is printed, the exit status, and that nothing holds it up."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import MappingProxyType

import pytest

from hetero import cli, doctor
from hetero.doctor import Diagnosis, Level, Snapshot, examination
from hetero.doctor.examination import SUBJECTS
from hetero.doctor.parallel import gather
from tests.support.doctor import here, run_doctor, worst, write_cluster

Capture = pytest.CaptureFixture[str]


def test_without_a_cluster_every_subject_is_examined_and_the_status_is_0(tmp_path: Path) -> None:
    status, found = run_doctor(SAGEMAKER_BASE_DIR=str(tmp_path))
    assert list(found) == list(SUBJECTS)
    assert {subject: worst(diagnoses) for subject, diagnoses in found.items() if worst(diagnoses) == "error"} == {}
    assert status == 0
    assert "no cluster is described here" in found["cluster"][0]["found"]


def test_on_a_host_whose_peer_has_no_name_the_status_is_1_and_a_line_says_what_to_do(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "HETERO_HOSTS_FILE", write_cluster(tmp_path, {"one": "127.0.0.1", "two": ""})["HETERO_HOSTS_FILE"]
    )
    assert (
        cli.main(["doctor", "--cluster-file", str(tmp_path / "cluster.json"), "--host", "one", "--port", "17991"]) == 1
    )
    text = capsys.readouterr().out
    (line,) = [line for line in text.splitlines() if line.startswith("error")]
    assert line.split()[:2] == ["error", "names"]
    assert "host 'two' is not in the hosts file" in line
    assert "to do: run this again, because a platform may add names minutes after the start" in text
    assert text.splitlines()[-1].startswith("1 error, ")


def test_with_a_wrong_option_the_status_is_that_of_the_launcher(capsys: Capture) -> None:
    assert cli.main(["doctor", "--port", "0"]) == 2
    assert "port is 0; expected a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "is not JSON"), ('{"hosts": ["a"], "current_host": "b"}', "'b', which is not among the hosts")],
)
def test_description_of_no_use_is_an_error_and_the_rest_is_examined(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "input/config").mkdir(parents=True)
    (tmp_path / "input/config/resourceconfig.json").write_text(content)
    diagnoses = doctor.examine(here(tmp_path, {"SAGEMAKER_BASE_DIR": str(tmp_path)}, port=17992))
    (diagnosis,) = diagnoses["cluster"]
    assert words in diagnosis.found
    assert diagnosis.level is Level.ERROR
    assert list(diagnoses) == list(SUBJECTS)


def test_machine_that_is_no_host_of_the_file_looks_at_all_of_its_hosts(tmp_path: Path) -> None:
    environ = write_cluster(tmp_path, {"one": "127.31.77.2", "two": "127.31.77.3"})
    snapshot = here(tmp_path, environ, cluster_file=str(tmp_path / "cluster.json"), port=17993)
    diagnoses = doctor.examine(snapshot)
    assert diagnoses["cluster"][0].level is Level.WARNING
    assert diagnoses["names"][0].details["addresses"] == {"one": "127.31.77.2", "two": "127.31.77.3"}
    assert set(diagnoses["ports"][1].details["matrix"]) == {"one", "two"}  # type: ignore[call-overload]


def test_subject_that_fails_or_hangs_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def fails(_: Snapshot) -> list[Diagnosis]:
        raise RuntimeError("no such thing")

    def hangs(_: Snapshot) -> list[Diagnosis]:
        released.wait(300)
        return []

    subjects = {"fails": fails, "hangs": hangs, "versions": SUBJECTS["versions"]}
    monkeypatch.setattr(examination, "SUBJECTS", MappingProxyType(subjects))
    monkeypatch.setattr(examination, "_TIMEOUT_S", 3.0)
    begin_s = time.monotonic()
    diagnoses = doctor.examine(here(tmp_path))
    took_s = time.monotonic() - begin_s
    released.set()
    assert diagnoses["fails"][0].found == "the examination failed: RuntimeError: no such thing"
    (found,) = diagnoses["hangs"]
    assert (found.level, found.found) == (Level.WARNING, "the examination did not end within 3 s")
    assert diagnoses["versions"][0].level is Level.OK
    assert took_s < 30


def test_gather_returns_what_came_in_time() -> None:
    released = threading.Event()
    tasks = dict.fromkeys(range(200), lambda: released.wait(300))
    assert gather(tasks, timeout_s=0.2) == {}
    released.set()
    assert gather({"after": lambda: 2}, timeout_s=10) == {"after": 2}


def test_json_has_what_the_text_has(tmp_path: Path) -> None:
    diagnosis = Diagnosis(level=Level.WARNING, found="one\n  two\x1b[31m", to_do="three")
    text = doctor.render_text({"disk": [diagnosis]})
    assert text.splitlines()[0].split() == ["warning", "disk", "one"]
    assert "\x1b" not in text
    assert "0 errors, 1 warning, 0 ok" in text
    document = json.loads(json.dumps(doctor.to_json({"disk": [diagnosis]})))
    assert document["findings"] == [
        {"subject": "disk", "level": "warning", "found": diagnosis.found, "to_do": "three", "details": {}}
    ]
