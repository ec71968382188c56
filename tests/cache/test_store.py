"""The files of one data set: bounds, processes that share them, and files that others damage."""

from __future__ import annotations

import fcntl
import os
import random
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hetero.cache import folders
from hetero.cache.entries import EncodedSample
from hetero.cache.folders import SharedFolder, folder_bytes, remove_unused, sweep_memory
from hetero.cache.store import ABSENT, SampleStore
from hetero.errors import ConfigError

FINGERPRINT = b"f" * 20
SAMPLE_BYTES = 1000


def value_of(index: int) -> Any:
    return np.random.default_rng(index).integers(0, 256, SAMPLE_BYTES, np.uint8)


def sample_of(index: int) -> EncodedSample:
    return EncodedSample(value_of(index), index, FINGERPRINT)


def open_store(base: Path, *, max_bytes: int = 10**9, key: str = "key", num_samples: int = 10_000) -> SampleStore:
    return SampleStore(SharedFolder(base, "photos", key), FINGERPRINT, num_samples, max_bytes=max_bytes, free_share=0.0)


def has(store: SampleStore, index: int) -> bool:
    found = store.get(index)
    assert found is ABSENT or (found == value_of(index)).all()
    return found is not ABSENT


def num_open() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def files(base: Path) -> Path:
    (parent,) = base.glob("hetero-cache-*/data-photos")
    return parent


def test_kept_samples_are_there_for_a_later_process(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert not has(store, 7)
    assert all(store.put(index, sample_of(index)) for index in (7, 0, 9_999))
    assert has(store, 7)
    store.close()
    again = open_store(tmp_path)
    assert [has(again, index) for index in (0, 1, 7, 9_999)] == [True, False, True, True]
    again.close()


FILL = """
import sys
from pathlib import Path
import numpy as np
from hetero.cache.entries import EncodedSample
from hetero.cache.folders import SharedFolder
from hetero.cache.store import SampleStore
folder = SharedFolder(Path(sys.argv[1]), "photos", "key")
store = SampleStore(folder, b"f" * 20, 10_000, max_bytes=10**9, free_share=0.0)
for index in range(int(sys.argv[2]), 600, 2):
    value = np.random.default_rng(index).integers(0, 256, 1000, np.uint8)
    assert store.put(index, EncodedSample(value, index, b"f" * 20))
"""


def test_processes_that_write_at_once_share_what_they_keep(tmp_path: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", FILL, str(tmp_path), begin]) for begin in ("0", "1", "1")]
    assert [process.wait(100) for process in processes] == [0, 0, 0]
    store = open_store(tmp_path)
    assert all(has(store, number) for number in range(600))
    store.close()


def test_forked_process_writes_to_files_of_its_own(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(0, sample_of(0))
    pid = os.fork()
    if not pid:
        os._exit(not all(store.put(number, sample_of(number)) for number in range(100, 200)))
    assert all(store.put(number, sample_of(number)) for number in range(1, 100))
    assert os.waitpid(pid, 0)[1] == 0
    assert all(has(store, number) for number in range(200))
    store.close()


def test_bound_holds_and_what_is_kept_stays(tmp_path: Path) -> None:
    max_bytes = 400_000
    store = open_store(tmp_path, max_bytes=max_bytes)
    kept = [index for index in range(1000) if store.put(index, sample_of(index))]
    assert store.why_full.endswith(": the bound of 400 kB is reached")
    assert folder_bytes(files(tmp_path) / "key") <= max_bytes
    assert len(kept) > 0.5 * (max_bytes - 160_000) / SAMPLE_BYTES  # the slots take 160 kB
    assert kept == list(range(len(kept)))
    assert all(has(store, index) == (index in kept) for index in range(1000))
    store.close()


def test_other_fingerprints_make_room_unless_in_use(tmp_path: Path) -> None:
    bound = {"max_bytes": 400_000, "num_samples": 1_000}
    oldest, old = (open_store(tmp_path, key=key, **bound) for key in ("oldest", "old"))
    assert all(oldest.put(index, sample_of(index)) and old.put(index, sample_of(index)) for index in range(100))
    oldest.close()
    os.utime(files(tmp_path) / "oldest" / "lock", (1, 1))
    store = open_store(tmp_path, **bound)
    kept = sum(store.put(index, sample_of(index)) for index in range(1_000))
    assert kept > 200
    assert not (files(tmp_path) / "oldest").exists()
    assert all(has(old, index) for index in range(100))
    assert sum(folder_bytes(files(tmp_path) / key) for key in ("old", "key")) <= 400_000
    old.close()
    assert remove_unused(files(tmp_path), enough=1) > 100_000
    assert sorted(path.name for path in files(tmp_path).iterdir()) == ["key", "reserve"]
    store.close()


def test_full_disk_ends_the_keeping_and_nothing_else(tmp_path: Path) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mounted)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("needs leave to mount a small disk: root has it")
    try:
        store = open_store(mounted)
        kept = sum(store.put(index, sample_of(index)) for index in range(4_000))
        assert 1_000 < kept < 2_000
        assert sum(has(store, index) for index in range(4_000)) == kept
        assert store.num_damaged == 0
        store.close()
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def test_damaged_files_are_never_served(tmp_path: Path) -> None:
    store = open_store(tmp_path, num_samples=50)
    assert all(store.put(index, sample_of(index)) for index in range(50))
    folder = files(tmp_path) / "key"
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    chance = random.Random(2)
    num_damaged = 0
    for _ in range(300):
        name = chance.choice(["index", "data-0"])
        damaged = bytearray(whole[name])
        kind = chance.choice(["bytes", "truncate", "zeros"])
        begin = chance.randrange(min(len(damaged), 60_000))
        if kind == "bytes":
            damaged[begin : begin + 24] = chance.randbytes(len(damaged[begin : begin + 24]))
        elif kind == "truncate":
            del damaged[begin:]
        else:
            damaged[begin:] = bytes(len(damaged) - begin)
        (folder / name).write_bytes(damaged)
        found = [has(store, index) for index in range(50)]  # `has` compares what it finds
        num_damaged += not all(found)
        (folder / name).write_bytes(whole[name])
    assert num_damaged > 150
    assert all(has(store, index) for index in range(50))
    store.close()


def test_slot_with_absurd_numbers_allocates_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path, num_samples=4)
    store.put(0, sample_of(0))
    slots = [struct.pack("<IIQ", *numbers) for numbers in ((1, 2**32 - 1, 0), (999, 10, 0), (1, 40, 2**63))]
    (files(tmp_path) / "key" / "index").write_bytes(b"".join(slots))
    assert [store.get(index) for index in range(4)] == [ABSENT] * 4
    assert store.num_damaged == 3
    store.close()


def test_damaged_sample_is_kept_anew(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(5, sample_of(5))
    with (files(tmp_path) / "key" / "data-0").open("r+b") as data:
        data.seek(200)
        data.write(b"damage")
    assert not has(store, 5)
    store.put(5, sample_of(5))
    assert has(store, 5)
    store.close()


@pytest.mark.parametrize("what", ["mode", "link", "file"])
def test_folder_that_others_could_write_to_is_refused(tmp_path: Path, what: str) -> None:
    root = tmp_path / f"hetero-cache-{os.geteuid()}"
    if what == "mode":
        root.mkdir()
        root.chmod(0o770)
    elif what == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        root.symlink_to(tmp_path / "elsewhere")
    else:
        root.write_text("")
    with pytest.raises(ConfigError, match="must be a folder of user .* with mode 700.*\n.*Remove it"):
        SharedFolder(tmp_path, "photos", "key")


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    os.umask(mask := os.umask(0))
    try:
        os.umask(0)
        store = open_store(tmp_path)
        store.put(0, sample_of(0))
    finally:
        os.umask(mask)
    assert {path.lstat().st_mode & 0o077 for path in (tmp_path / f"hetero-cache-{os.geteuid()}").rglob("*")} == {0}
    store.close()


def test_process_that_ends_gives_back_what_it_had_reserved(tmp_path: Path) -> None:
    for number in range(50):
        store = open_store(tmp_path, num_samples=100)
        assert store.put(number, sample_of(number))
        store.close()
    assert folder_bytes(files(tmp_path) / "key") < 50 * 2 * SAMPLE_BYTES
    store = open_store(tmp_path, num_samples=100)
    assert sum(has(store, number) for number in range(100)) == 50
    store.close()


def test_few_files_are_open_at_once(tmp_path: Path) -> None:
    for number in range(100):
        store = open_store(tmp_path, num_samples=100)
        assert store.put(number, sample_of(number))
        store.close()
    store = open_store(tmp_path, num_samples=100)
    before = num_open()
    for _ in range(2):
        assert all(has(store, number) for number in range(100))
    assert num_open() - before <= 64
    store.close()


def test_old_fingerprints_make_room_on_a_scarce_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = open_store(tmp_path, key="old", num_samples=100)
    assert old.put(0, sample_of(0))
    old.close()
    store = open_store(tmp_path, num_samples=100)

    def disk_usage(_path: Path) -> SimpleNamespace:
        return SimpleNamespace(total=10**9, free=0 if (files(tmp_path) / "old").exists() else 10**7)

    monkeypatch.setattr("shutil.disk_usage", disk_usage)
    assert store.put(0, sample_of(0))
    assert not (files(tmp_path) / "old").exists()
    store.close()


def test_length_that_no_file_can_have(tmp_path: Path) -> None:
    store = open_store(tmp_path, num_samples=2**62, max_bytes=10**7)
    assert [store.get(2**61), store.get(10**8)] == [ABSENT] * 2
    assert not store.put(2**61, sample_of(1))
    store.close()
    sparse = open_store(tmp_path, key="sparse", num_samples=10**9, max_bytes=10**7)
    assert all(sparse.put(number, sample_of(number)) for number in (0, 10**8, 10**9 - 1))
    sparse.close()


OPEN_AND_SWEEP = """
import sys
from pathlib import Path
from hetero.cache import folders
folders.MEMORY = Path(sys.argv[1])
for number in range(200):
    folders.SharedFolder(folders.MEMORY, "photos", "key").close()
    folders.sweep_memory()
"""


def test_folder_is_there_although_others_remove_it(tmp_path: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", OPEN_AND_SWEEP, str(tmp_path)]) for _ in range(4)]
    assert [process.wait(100) for process in processes] == [0] * 4


def test_lock_of_another_process_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "CALL_TIMEOUT_S", 0.2)
    store = open_store(tmp_path)
    with (files(tmp_path) / "reserve").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not store.put(0, sample_of(0))
    assert store.why_full.endswith("another process has had the lock for 0.2 s")
    store.close()


def test_sweep_removes_what_nobody_uses(memory: Path) -> None:
    used, unused = open_store(memory, key="used"), open_store(memory, key="unused")
    used.put(0, sample_of(0))
    unused.put(0, sample_of(0))
    unused.close()
    sweep_memory()
    assert sorted(path.name for path in files(memory).iterdir()) == ["reserve", "used"]
    assert has(used, 0)
    used.close()
    sweep_memory()
    assert list(memory.iterdir()) == []
    sweep_memory()


def test_folder_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"no folder .*/missing; make it"):
        SharedFolder(tmp_path / "missing", "photos", "key")
    assert not (tmp_path / "missing").exists()
