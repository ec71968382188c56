"""Untrusted YAML, wherever the package reads it, and files that appear whole."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hetero
from hetero import cli
from hetero.documents.files import MAX_BYTES, parse_yaml, write_text
from hetero.errors import ConfigError, ExitCode
from hetero.pricing import Catalogue

PACKAGE = Path(hetero.__file__).parent
LAUGHS = "a: &a [ha, ha, ha, ha, ha, ha, ha, ha, ha, ha]\n" + "".join(
    f"{chr(98 + level)}: &{chr(98 + level)} [{', '.join(['*' + chr(97 + level)] * 10)}]\n" for level in range(12)
)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "object": (b"!!python/object/apply:os.system ['touch CANARY']", "not YAML that can be used"),
    "object within": (b"port: !!python/object/new:os.system ['touch CANARY']", "not YAML that can be used"),
    "name": (b"port: !!python/name:os.system", "not YAML that can be used"),
    "module": (b"port: !!python/module:this", "not YAML that can be used"),
    "own tag": (b"port: !own 1", "not YAML that can be used"),
    "aliases": (b"a: &a [1]\nb: *a", "uses YAML aliases"),
    "billion laughs": (LAUGHS.encode(), "uses YAML aliases"),
    "alias to itself": (b"a: &a [*a]", "uses YAML aliases"),
    "merged aliases": (b"a: &a {x: 1}\nb:\n  <<: *a", "uses YAML aliases"),
    "over a mebibyte": (b"# " + b"x" * MAX_BYTES, "too large; expected at most 1048576 bytes"),
    "deep": (b"[" * 1_000_000, "it nests deeper than 32 levels"),
    "deep mappings": (b"{a: " * 5_000, "it nests deeper than 32 levels"),
    "deep lists": (b"- " * 5_000 + b"a", "it nests deeper than 32 levels"),
    "number of 10^6 digits": (b"port: " + b"9" * 1_000_000, "a value of 1000000 characters"),
    "number of 4500 digits": (b"port: !!int " + b"9" * 4096, "holds a whole number of|not YAML"),
    "hexadecimal number": (b"port: 0x" + b"f" * 4000, "a whole number of 16000 bits, at most 64"),
    "hexadecimal key": (b"0x" + b"f" * 400 + b": 1", "a whole number of 1600 bits"),
    "number in base 60": (b"port: 1" + b":59" * 300_000, "a value of 900001 characters"),
    "date that is none": (b"as_of: 2026-99-99", "not YAML that can be used: month must be"),
    "time that is none": (b"as_of: 2026-01-01 99:99:99", "not YAML that can be used"),
    "unhashable key": (b"{[a]: 1}", "not YAML that can be used"),
    "not UTF-8": (b"\xff\xfe", "not YAML that can be used"),
    "zero bytes": (b"\0\0", "not YAML that can be used"),
    "two documents": (b"a: 1\n---\nb: 2", "not YAML that can be used"),
    "control characters": (b"a: \x1b[31m", "not YAML that can be used"),
}


@pytest.mark.attack("A17")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_yaml_is_refused(name: str) -> None:
    content, message = HOSTILE[name]
    with pytest.raises(ConfigError, match=message) as caught:
        parse_yaml(content, "the file")
    assert str(caught.value).startswith("the file ")
    assert len(str(caught.value)) < 1000
    assert not Path("CANARY").exists()


@pytest.mark.attack("A17")
@pytest.mark.attack("A22")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_yaml_is_a_usage_error_wherever_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file.yaml"
    path.write_bytes(HOSTILE[name][0])
    for command in (
        ["launch", "--config", str(path), "train.py"],
        ["simulate", "--config", str(path), "--group", "trainers=ml.p3.2xlarge:1", "train.py"],
        ["prices", "list", "--price-file", str(path)],
    ):
        assert cli.main(command) == ExitCode.USAGE
        assert "file.yaml" in capsys.readouterr().err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file.yaml"]


@pytest.mark.attack("A17")
def test_hostile_yaml_takes_little_memory(tmp_path: Path) -> None:
    """Run in a process with at most 400 MiB. A mebibyte of the library's objects takes a few dozen."""
    contents = [LAUGHS.encode(), b"[" * 1_000_000, b"{a: " * 250_000, b"- 1\n" * 20_000, b"a,\n" * 30_000]
    for number, content in enumerate(contents):
        (tmp_path / str(number)).write_bytes(content)
    script = (
        "import sys, pathlib\n"
        "from hetero.documents.files import parse_yaml\n"
        "from hetero.errors import ConfigError\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n"
        "        parse_yaml(pathlib.Path(path).read_bytes(), path)\n"
        "    except ConfigError:\n"
        "        pass\n"
    )
    command = [sys.executable, "-c", script, *map(str, sorted(tmp_path.iterdir()))]
    bound = 400 * 2**20
    done = subprocess.run(
        command,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (bound, bound)),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.attack("A17")
def test_every_yaml_of_the_package_is_read_in_one_place() -> None:
    importing = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.partition(".")[0] == "yaml" for name in names):
                importing.add(str(path.relative_to(PACKAGE)))
    assert importing == {"documents/files.py"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", None),
        (b"port: 17170\nroles: [a=data]\nratio: 1.5\n", {"port": 17170, "roles": ["a=data"], "ratio": 1.5}),
        (b"text: '" + b"x" * 10_000 + b"'", {"text": "x" * 10_000}),
        (b"nested: [[1, {a: true}], null]", {"nested": [[1, {"a": True}], None]}),
        (b"large: 18446744073709551615", {"large": 2**64 - 1}),
    ],
)
def test_plain_yaml_is_read(content: bytes, expected: Any) -> None:
    assert parse_yaml(content, "the file") == expected


@given(st.binary(max_size=200) | st.text(alphabet="ab:[]{}-&*!|>'\"#%@`0x.e+_,? \n\t", max_size=80).map(str.encode))
def test_any_bytes_are_yaml_or_a_config_error(content: bytes) -> None:
    try:
        parse_yaml(content, "the file")
    except ConfigError:
        return


@pytest.mark.attack("A22")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("hourly_usd: {ml.x: .nan}", "found nan, expected USD per hour above 0 and below 1000"),
        ("hourly_usd: {ml.x: .inf}", "found inf"),
        ("hourly_usd: {ml.x: -.inf}", "found -inf"),
        ("hourly_usd: {ml.x: -0.01}", "found -0.01"),
        ("hourly_usd: {ml.x: 0}", "found 0"),
        ("hourly_usd: {ml.x: 1e9}", "expected USD per hour"),
        ("hourly_usd: {ml.x: 1000.0}", "below 1000"),
        ("hourly_usd: {ml.x: 2026-01-01}", "as a number"),
        ("hourly_usd: {ml.x: '=1+1'}", "as a number"),
        ("hourly_usd: {ml.x: [1]}", "as a number"),
        ("hourly_usd: {'<script>alert(1)</script>': 1}", "expected an instance type"),
        ("hourly_usd: {'=cmd|x': 1}", "expected an instance type"),
        ('hourly_usd: {"\\e[31mml.x": 1}', "expected an instance type"),
        ('hourly_usd: {"ml.x\\n": 1}', "expected an instance type"),
        ("hourly_usd: {" + "x" * 65 + ": 1}", "expected an instance type"),
        ("hourly_usd: {17: 1}", "expected an instance type"),
        ("hourly_usd: {}\nsource: " + "x" * 201, "source: found"),
        ('hourly_usd: {}\nsource: "\\e[2J"', "source: found"),
        ('hourly_usd: {}\nas_of: "a\\nb"', "as_of: found"),
        ('hourly_usd: {}\n"\\e[31m": 1', r"\\x1b\[31m: unknown key"),
    ],
)
def test_hostile_prices_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        Catalogue.load(price_file=path, region="us-east-1")
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.attack("A22")
@pytest.mark.parametrize(
    "flag", ["<script>=1", "\x1b[31m=1", "=1+1=2", "ml.x=1e400", "ml.x=nan", "a b=1", "x" * 65 + "=1"]
)
def test_hostile_price_flags_are_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match="--price"):
        Catalogue.load(overrides=[flag])


def test_written_file_is_never_seen_half(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    texts = ["a" * 200_000, "b" * 200_000]
    write_text(path, texts[0])
    ended = threading.Event()

    def write() -> None:
        for number in range(200):
            write_text(path, texts[number % 2])
        ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not ended.is_set():
        assert path.read_text() in texts
    thread.join()
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize("content", [b"a: 1\nb: 2\na: 3\n", b"- {x: {a: 1, a: 1}}\n", b"? {a: 1, a: 2}\n: 3\n"])
def test_key_that_occurs_twice_is_rejected(content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"FILE has the key 'a' twice, again in line \d; remove one"):
        parse_yaml(content, "FILE")


def test_same_key_in_two_objects_is_accepted() -> None:
    assert parse_yaml(b"a: {x: 1}\nb: {x: 2}\n", "FILE") == {"a": {"x": 1}, "b": {"x": 2}}
