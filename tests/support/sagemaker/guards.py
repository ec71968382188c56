"""What tests of recordings watch: the network, and the state of the user's objects."""

from __future__ import annotations

import io
import os
import socket
import tarfile
from pathlib import Path
from typing import Any

import pytest


def hide_account(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Hide the machine's AWS configuration and its metadata service, because a test must not have an account."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "none"))


def watch_network(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the addresses that were looked up or connected to since. Neither gets anywhere."""
    attempts: list[object] = []

    def look_up(host: object, *_: object, **__: object) -> None:
        attempts.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "no network in this test")

    def connect(_: socket.socket, address: object) -> None:
        attempts.append(address)
        raise ConnectionRefusedError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket.socket, "connect", connect)
    return attempts


def state_of(thing: Any) -> dict[str, Any]:
    """Return the attributes of an object. Values that can change in place are copies."""
    return {
        name: value.copy() if isinstance(value, dict | list | set) else value for name, value in vars(thing).items()
    }


def unpacked(archive: bytes) -> dict[str, bytes]:
    """Return the files of a tar.gz. The archive itself has times in it."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name: file.read() for member in tar if (file := tar.extractfile(member)) is not None}
