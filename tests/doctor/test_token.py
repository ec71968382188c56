"""Token and certificates: where from, whether of use, and never what they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero.doctor import Level, examine, render_text, to_json
from hetero.doctor.token import examine as examine_token
from hetero.launch.job_token import STAGED_FOLDER, TOKEN_NAME
from hetero.wire.certificates import make_certificates
from tests.support.doctor import here, in_cluster, levels

SECRET = "S3cret-token-of-this-test-0123456789"


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "token"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    return path


def test_no_token_matters_only_where_there_is_a_job(tmp_path: Path) -> None:
    assert levels(examine_token(here(tmp_path))) == [Level.OK]
    assert levels(examine_token(in_cluster(tmp_path, {"a": "127.0.0.1"}))) == [Level.WARNING]
    (diagnosis,) = examine_token(here(tmp_path, require_token=True))
    assert diagnosis.level is Level.ERROR
    assert "--require-token demands one" in diagnosis.found


def test_token_is_said_to_be_in_its_file_and_is_never_shown(tmp_path: Path, token_file: Path) -> None:
    snapshot = here(tmp_path, {"HETERO_TOKEN_FILE": str(token_file)}, port=17995)
    (diagnosis,) = examine_token(snapshot)
    assert diagnosis.level is Level.OK
    assert str(token_file) in diagnosis.found
    diagnoses = examine(snapshot)
    assert SECRET not in render_text(diagnoses) + json.dumps(to_json(diagnoses))


def test_token_that_came_with_the_code_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ml/code" / STAGED_FOLDER).mkdir(parents=True)
    path = tmp_path / "ml/code" / STAGED_FOLDER / TOKEN_NAME
    path.write_text(SECRET)
    monkeypatch.chdir(tmp_path)
    (diagnosis,) = examine_token(here(tmp_path, require_token=True))
    assert diagnosis.level is Level.OK
    assert diagnosis.found == f"a token came with the code in {tmp_path / 'ml/code'}"
    path.write_text("no token")
    (diagnosis,) = examine_token(here(tmp_path))
    assert diagnosis.level is Level.ERROR


@pytest.mark.parametrize("fault", ["open to others", "not there", "empty"])
def test_token_file_of_no_use_is_an_error_that_does_not_show_it(tmp_path: Path, token_file: Path, fault: str) -> None:
    if fault == "open to others":
        token_file.chmod(0o644)
    elif fault == "not there":
        token_file.unlink()
    else:
        token_file.write_text("")
    (diagnosis,) = examine_token(here(tmp_path, {"HETERO_TOKEN_FILE": str(token_file)}))
    assert diagnosis.level is Level.ERROR
    assert str(token_file) in diagnosis.found
    assert SECRET not in diagnosis.found + diagnosis.to_do


def test_token_elsewhere_is_an_error_that_does_not_show_it(tmp_path: Path) -> None:
    config = tmp_path / "ml/input/config"
    config.mkdir(parents=True)
    (config / "hyperparameters.json").write_text(json.dumps({"hetero_token": SECRET}))
    diagnoses = examine_token(here(tmp_path, {"HETERO_TOKEN": SECRET}))
    assert levels(diagnoses) == [Level.OK, Level.ERROR, Level.ERROR]
    text = " ".join(diagnosis.found + diagnosis.to_do for diagnosis in diagnoses)
    assert "the variable HETERO_TOKEN" in text
    assert "the hyperparameter hetero_token" in text
    assert SECRET not in text


def test_certificate_is_read_and_its_end_told(tmp_path: Path) -> None:
    make_certificates(tmp_path / "tls", ["a"], days=30, keep_authority_key=False)
    *_, diagnosis = examine_token(in_cluster(tmp_path, {"a": "127.0.0.1"}, tls_dir=tmp_path / "tls"))
    assert diagnosis.level is Level.OK
    assert "the certificate of a in" in diagnosis.found


def test_certificate_of_another_host_is_an_error(tmp_path: Path) -> None:
    make_certificates(tmp_path / "tls", ["b"], days=30, keep_authority_key=False)
    *_, diagnosis = examine_token(in_cluster(tmp_path, {"a": "127.0.0.1"}, tls_dir=tmp_path / "tls"))
    assert diagnosis.level is Level.ERROR
    assert "a.pem" in diagnosis.found
