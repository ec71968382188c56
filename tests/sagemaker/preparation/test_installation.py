"""What pip does with the staged requirements in a container: it installs hetero, and leaves all else alone."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

import hetero
from hetero.sagemaker.preparation import staging

pytest.importorskip("pip", reason="installs what has been staged")

# Requirements of hetero that a deep learning container has, in the oldest versions, and packages that must stay.
OLDEST = {
    "boto3": "1.28.57",
    "grpcio": "1.49.1",
    "numpy": "1.24.0",
    "protobuf": "4.25.0",
    "psutil": "5.9.0",
    "PyYAML": "6.0",
    "sagemaker-training": "4.7.4",
    "torch": "2.1.0",
    "xxhash": "3.0.0",
}
SHOWN = """
import importlib.metadata, json
print(json.dumps({each.name.lower().replace("_", "-"): each.version for each in importlib.metadata.distributions()}))
"""


def installed(python: Path) -> dict[str, str]:
    """Return what an environment has: name -> version."""
    output = subprocess.check_output([python, "-c", SHOWN], text=True)
    found: dict[str, str] = json.loads(output)
    return found


def pip(python: Path, code_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pip as the toolkit does, in the folder of the code, without a registry."""
    return subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-input", *arguments],
        cwd=code_dir,
        env={**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def planned(python: Path, code_dir: Path) -> set[str]:
    """Return what pip would install or change."""
    done = pip(python, code_dir, "-q", "--dry-run", "--report", "-", "-r", "requirements.txt")
    assert done.returncode == 0, done.stderr
    return {each["metadata"]["name"] for each in json.loads(done.stdout)["install"]}


def make_environment(folder: Path) -> tuple[Path, Path]:
    """Return the interpreter of a new environment, and where it keeps packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    return folder / "bin" / "python", packages


def note_installed(packages: Path, versions: Mapping[str, str]) -> None:
    """Have an environment look as if it had packages: pip reads no more of them than this."""
    for name, version in versions.items():
        info = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "INSTALLER").write_text("pip\n")
        (info / "RECORD").write_text("")


def write_wheel(folder: Path, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    members = {
        f"{name}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},"
        for path, text in members.items()
    ]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in members.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,\n"]))


@pytest.fixture
def code_dir(tmp_path: Path) -> Path:
    """Return a job's code after `prepare`."""
    return stage(tmp_path)


def stage(tmp_path: Path, *, wheels: Path | None = None) -> Path:
    folder = tmp_path / "staged"
    folder.mkdir()
    (folder / "requirements.txt").write_text("# none of the user's\n")
    staging._add_ours(folder, "requirements.txt", token=True, wheels=wheels, is_offline=False)
    return folder


@pytest.fixture
def frozen(tmp_path: Path) -> Path:
    """Return the interpreter of an environment that sees all that this one has but hetero, and cannot change it."""
    container = tmp_path / "container"
    container.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "hetero" not in path.name:
            (container / path.name).symlink_to(path)
    python, packages = make_environment(tmp_path / "frozen")
    (packages / "container.pth").write_text(f"{container}\n")
    return python


def test_installation_changes_no_package_of_a_container_but_ours(frozen: Path, code_dir: Path, tmp_path: Path) -> None:
    before = installed(frozen)
    assert {"torch", "protobuf", "grpcio", "sagemaker-training"} <= set(before)
    done = pip(frozen, code_dir, "-r", "requirements.txt")
    assert done.returncode == 0, done.stderr
    assert "Successfully installed hetero-" in done.stdout
    after = installed(frozen)
    assert after == before | {"hetero": hetero.__version__}


@pytest.mark.integration
def test_staged_launcher_runs_the_script_with_the_installed_wheel_and_the_staged_token(
    frozen: Path, code_dir: Path, tmp_path: Path
) -> None:
    assert pip(frozen, code_dir, "-q", "-r", "requirements.txt").returncode == 0
    (code_dir / "train.py").write_text(
        "import json, os, sys, hetero\n"
        "shown = sys.argv[1:], hetero.__file__, open(os.environ['HETERO_TOKEN_FILE']).read()\n"
        "open(os.environ['SHOWN'], 'w').write(json.dumps(shown))\n"
    )
    base = tmp_path / "opt-ml"
    config = base / "input" / "config"
    config.mkdir(parents=True)
    resources = {"current_host": "localhost", "hosts": ["localhost"], "network_interface_name": "lo"}
    (config / "resourceconfig.json").write_text(json.dumps(resources))
    (config / "hyperparameters.json").write_text(json.dumps({"hetero_script": '"train.py"', "name": '"two words"'}))
    done = subprocess.run(
        [frozen, "hetero-launcher.py", "--hetero_script", "train.py", "--name", "two", "words"],
        cwd=code_dir,
        env={**os.environ, "SAGEMAKER_BASE_DIR": str(base), "SHOWN": str(tmp_path / "shown"), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    arguments, where, secret = json.loads((tmp_path / "shown").read_text())
    assert arguments == ["--name", "two words"]
    assert Path(where).is_relative_to(tmp_path / "frozen")
    assert secret == (code_dir / "hetero-job" / "token").read_text().strip()
    assert "has no token" not in done.stdout + done.stderr
    assert secret not in done.stdout + done.stderr


def test_oldest_versions_that_will_do_stay(tmp_path: Path, code_dir: Path) -> None:
    python, packages = make_environment(tmp_path / "oldest")
    note_installed(packages, OLDEST)
    assert planned(python, code_dir) == {"hetero"}


def test_what_the_image_lacks_comes_from_the_wheels_and_nothing_else_does(tmp_path: Path) -> None:
    python, packages = make_environment(tmp_path / "lacking")
    note_installed(packages, {name: version for name, version in OLDEST.items() if name != "xxhash"})
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels, "xxhash", "3.5.0")
    write_wheel(wheels, "psutil", "7.0.0")  # newer than the image's, which will do
    assert planned(python, stage(tmp_path, wheels=wheels)) == {"hetero", "xxhash"}


@pytest.mark.parametrize("is_package", [True, False])
def test_code_with_a_setup_file_is_installed_as_before(tmp_path: Path, code_dir: Path, is_package: bool) -> None:
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("pip needs setuptools to build the user's package")
    (code_dir / "setup.py").write_text("import setuptools\nsetuptools.setup(name='users', version='1.0')\n")
    own = code_dir / ("users/__init__.py" if is_package else "users.py")
    own.parent.mkdir(exist_ok=True)
    own.touch()
    command = ["-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(tmp_path), "."]
    done = subprocess.run([sys.executable, *command], cwd=code_dir, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / "users-1.0-py3-none-any.whl") as wheel:
        assert str(own.relative_to(code_dir)) in wheel.namelist()
        assert not any("hetero" in name for name in wheel.namelist())


def test_lack_without_wheels_and_without_a_registry_is_said_by_name(tmp_path: Path, code_dir: Path) -> None:
    python, packages = make_environment(tmp_path / "lacking")
    note_installed(packages, {name: version for name, version in OLDEST.items() if name != "xxhash"})
    done = pip(python, code_dir, "--dry-run", "-r", "requirements.txt")
    assert done.returncode != 0
    assert "No matching distribution found for xxhash" in done.stderr
