"""Shards in S3, as moto serves it, 30 ms away: few requests, one listing for all endpoints of a host."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hetero
from hetero import shards
from hetero.control.rank import session as control
from tests.support.slow_store import SlowProxy

torch = pytest.importorskip("torch")
s3fs = pytest.importorskip("s3fs", reason="needs the package of the store: pip install s3fs")
pytest.importorskip("flask_cors", reason="moto's server needs flask-cors")
boto3 = pytest.importorskip("boto3")

from hetero.torch import DataLoader  # noqa: E402
from tests.support.torch.endpoints import ServedJob, imported_script  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of s3fs
NUM_SHARDS, NUM_ROWS, ROW_BYTES = 4, 60, 100_000
DELAY_S = 0.03
SERVER = """
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0)
server.start()
print(server.get_host_and_port()[1], flush=True)
input()
"""
SCRIPT = """
    import hetero
    from hetero import shards

    @hetero.dataset
    def stored_rows(scratch):
        files = "s3://bucket/train-*.tar"
        return shards.tar(files, scratch=scratch, lanes=4, chunk_rows=10).map(lambda row: int(row["__key__"]))
"""


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowProxy]:
    """Write the shards into a bucket, with their index. Return the proxy before it."""
    folder = tmp_path / "data"
    folder.mkdir()
    for shard in range(NUM_SHARDS):
        with tarfile.open(folder / f"train-{shard}.tar", "w") as archive:
            for row in range(NUM_ROWS):
                member = tarfile.TarInfo(f"{shard * NUM_ROWS + row:05d}.bin")
                member.size = ROW_BYTES
                archive.addfile(member, io.BytesIO(os.urandom(ROW_BYTES)))
    subprocess.run([sys.executable, "-m", "hetero.cli", "index", str(folder / "*.tar")], check=True)
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        port = int(next(line for line in server.stdout if line.strip().isdecimal()))
        for name, value in (("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret"), ("DEFAULT_REGION", "us-east-1")):
            monkeypatch.setenv(f"AWS_{name}", value)
        client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}")
        client.create_bucket(Bucket="bucket")
        for file in folder.iterdir():
            client.upload_file(str(file), "bucket", file.name)
        found = SlowProxy(port, DELAY_S)
        monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", f"http://127.0.0.1:{found.port}")
        import fsspec

        fsspec.config.set_conf_env(fsspec.config.conf)
        s3fs.S3FileSystem.clear_instance_cache()
        yield found
        found.close()
    finally:
        server.kill()
        server.wait()


def test_samples_of_a_distant_store_come_in_few_requests(proxy: SlowProxy, tmp_path: Path) -> None:
    rows = shards.tar("s3://bucket/train-*.tar", scratch=tmp_path / "scratch", lanes=4, chunk_rows=10)
    before = proxy.num_bytes
    begin_s = time.monotonic()
    found = [
        row["__key__"] for batch in DataLoader(rows, batch_size=10, shuffle="window", collate_fn=list) for row in batch
    ]  # type: ignore[arg-type]
    took_s = time.monotonic() - begin_s
    num_samples = NUM_SHARDS * NUM_ROWS
    assert sorted(map(int, found)) == list(range(num_samples))
    one_by_one_s = num_samples * DELAY_S
    assert proxy.requests["GET"] * 10 <= num_samples
    assert proxy.num_bytes - before <= 1.05 * num_samples * (ROW_BYTES + 1024)
    print(f"{took_s:.2f} s, one request at a time at least {one_by_one_s:.2f} s, {dict(proxy.requests)}")


@pytest.mark.parametrize("num_endpoints", [8, pytest.param(32, marks=pytest.mark.long)])
def test_endpoints_of_a_host_list_and_download_once(
    proxy: SlowProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_endpoints: int
) -> None:
    with imported_script(tmp_path, "stored_rows_script", SCRIPT) as script:
        job = ServedJob(tmp_path, Path(script.__file__))
        job.start(num_endpoints)
        monkeypatch.setattr(control, "_session", job)
        proxy.requests.clear()
        before = proxy.num_bytes
        try:
            spec = script.stored_rows(scratch=str(tmp_path / "scratch"))
            loader: Any = DataLoader(spec, batch_size=10, shuffle="window")
            found = [number for batch in loader for number in batch.tolist()]
        finally:
            job.stop()
            hetero.spec.set_describer(None)
    assert sorted(found) == list(range(NUM_SHARDS * NUM_ROWS))
    assert proxy.requests["list"] == 1
    assert proxy.num_bytes - before <= 1.05 * NUM_SHARDS * NUM_ROWS * (ROW_BYTES + 1024)
