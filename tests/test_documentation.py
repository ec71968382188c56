"""What the README says is what the program does."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hetero import cli, config
from hetero.cluster import Role, read_cluster
from hetero.errors import ExitCode

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    """Return the ``hetero`` commands in the README's shell blocks, continued lines joined."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("hetero ")]


@pytest.mark.parametrize("code", ExitCode)
def test_readme_lists_every_exit_code_with_its_help_text(code: ExitCode) -> None:
    assert f"| {int(code)} | {code.help_text} |" in README


@pytest.mark.parametrize("command", commands())
def test_readme_command_is_understood(command: str) -> None:
    _, *arguments = shlex.split(command, comments=True)
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    assert config.parse(cli._make_parser(), ours).run is not None


def test_readme_cluster_file_is_read(tmp_path: Path) -> None:
    (block,) = re.findall(r"```json\n(.*?)```", README, re.DOTALL)
    path = tmp_path / "cluster.json"
    path.write_text(block)
    cluster = read_cluster(env={}, cluster_file=str(path), host="node-7")
    assert cluster.role is Role.TRAINER
    assert [host.name for host in cluster.data_hosts] == ["node-1", "node-2"]


def test_readme_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
