"""Opens a page in headless Chromium, as a reader would."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None and "HETERO_TEST_SYSTEM_PROGRAMS" not in os.environ, reason="there is no Chromium"
)


@dataclass(frozen=True)
class Opened:
    """What a browser made of a page."""

    dom: str
    """The document after it was rendered, as HTML."""
    console: list[str]
    """Lines of the browser's console."""
    requests: list[str]
    """Addresses that the browser asked for, without the page itself."""
    screenshot: Path


def open_page(page: Path, folder: Path) -> Opened:
    """Open a file in Chromium, with a new profile in ``folder``."""
    assert CHROMIUM is not None, "install chromium"
    net_log, screenshot = folder / "net.json", folder / "page.png"
    quiet = ("background-networking", "component-update", "sync", "quic", "gpu")
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in quiet)),
        *(f"--user-data-dir={folder / 'profile'}", f"--log-net-log={net_log}", "--enable-logging=stderr"),
        "--host-resolver-rules=MAP * ~NOTFOUND",  # the browser itself asks for updates
        *("--window-size=1200,2400", f"--screenshot={screenshot}", "--dump-dom", page.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return Opened(
        dom=done.stdout,
        console=[line for line in done.stderr.splitlines() if ":CONSOLE" in line],
        requests=_requests(net_log),
        screenshot=screenshot,
    )


def _requests(net_log: Path) -> list[str]:
    """Return the addresses that a page has asked for. Requests of the browser itself lack an origin as initiator."""
    events = json.loads(net_log.read_text(encoding="utf-8"))["events"]
    asked = [params for event in events if "initiator" in (params := event.get("params") or {})]
    return sorted({params["url"] for params in asked if params["initiator"] != "not an origin"})
