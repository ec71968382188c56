from __future__ import annotations

from pathlib import Path

import pytest

from hetero.system import cgroups
from hetero.system.cgroups import MemoryUse, cpu_quota, free_memory, memory_use, oom_kills

GIB = 2**30
UNLIMITED = 9223372036854771712
NAMES = {1: ("memory.max_usage_in_bytes", "memory.limit_in_bytes"), 2: ("memory.peak", "memory.max")}


class Machine:
    """A process's folder under /proc, and control groups of one version, as text files."""

    def __init__(self, folder: Path, version: int, *, group: str, root: str = "/") -> None:
        """Have ``group`` be the process's, and ``root`` the group that is mounted."""
        self.process, self.top, self._version = folder / "proc", folder / "groups", version
        self.process.mkdir()
        self.top.mkdir()
        own = {1: f"9:name=systemd:/init\n5:cpu,memory:{group}\n0::/other\n", 2: f"0::{group}\n"}
        kind = {1: "cgroup none rw,cpu,memory", 2: "cgroup2 none rw,nsdelegate"}
        elsewhere = f"30 1 0:9 / {folder}/elsewhere rw - cgroup none rw,pids\n31 1 8:1 / / rw,relatime - ext4 disk rw\n"
        mount = f"32 31 0:30 {root} {self.top} rw,nosuid shared:9 - {kind[version]}\n"
        (self.process / "cgroup").write_text(own[version])
        (self.process / "mountinfo").write_text(elsewhere + mount)

    def has(self, group: str, peak: int, limit: int | str | None) -> None:
        """Have a group, named as it is to be seen here, with its figures."""
        folder = self.top / group
        folder.mkdir(parents=True, exist_ok=True)
        peak_file, limit_file = NAMES[self._version]
        (folder / peak_file).write_text(f"{peak}\n")
        if limit is not None:
            (folder / limit_file).write_text(f"{limit}\n")

    def shares(self, group: str, quota: int | str, period: int = 100_000) -> None:
        """Have a group with a quota of CPU time, in microseconds."""
        folder = self.top / group
        folder.mkdir(parents=True, exist_ok=True)
        if self._version == 2:
            (folder / "cpu.max").write_text(f"{quota} {period}\n")
        else:
            (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
            (folder / "cpu.cfs_period_us").write_text(f"{period}\n")

    def is_whole(self) -> None:
        """Have what is mounted begin with the group of the whole machine."""
        (self.top / "release_agent").touch()


def use(peak: int, limit: int | None, *, is_own: bool = True) -> MemoryUse:
    return MemoryUse(peak_bytes=peak, limit_bytes=limit, is_own=is_own)


@pytest.mark.parametrize("version", [1, 2])
def test_own_group_is_read_below_those_of_the_machine(tmp_path: Path, version: int) -> None:
    machine = Machine(tmp_path, version, group="/jobs/one")
    machine.has("jobs/one", 3 * GIB, 4 * GIB)
    machine.has("jobs", 30 * GIB, 64 * GIB)
    if version == 1:
        machine.has(".", 500 * GIB, UNLIMITED)
        machine.is_whole()
    assert memory_use(machine.process) == use(3 * GIB, 4 * GIB)


@pytest.mark.parametrize(
    ("version", "name", "lines"),
    [
        (1, "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
        (2, "memory.events", "low 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 1\n"),
    ],
)
def test_kills_are_those_of_the_nearest_group_that_counts_them(
    tmp_path: Path, version: int, name: str, lines: str
) -> None:
    machine = Machine(tmp_path, version, group="/jobs/one")
    machine.has("jobs/one", GIB, None)
    assert oom_kills(machine.process) is None
    (machine.top / "jobs" / name).write_text(lines)
    assert oom_kills(machine.process) == 2
    (machine.top / "jobs/one" / name).write_text("under_oom 0\noom_kill 1\n")
    assert oom_kills(machine.process) == 1


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("group", ["/", "/docker/abc"])
def test_group_of_a_container_is_at_the_top_of_what_it_sees(tmp_path: Path, version: int, group: str) -> None:
    machine = Machine(tmp_path, version, group=group, root=group)
    machine.has(".", GIB, 2 * GIB)
    assert memory_use(machine.process) == use(GIB, 2 * GIB)


@pytest.mark.parametrize(
    ("version", "names"),
    [
        (1, ("memory.usage_in_bytes", "total_inactive_file 100\ntotal_active_file 20\ntotal_rss 5\n")),
        (2, ("memory.current", "anon 5\ninactive_file 100\nactive_file 20\n")),
    ],
)
def test_free_memory_counts_cached_files_and_the_smallest_group(
    tmp_path: Path, version: int, names: tuple[str, str]
) -> None:
    current, stat = names
    machine = Machine(tmp_path, version, group="/jobs/one")
    assert free_memory(machine.process) is None
    machine.has("jobs/one", GIB, 4 * GIB)
    assert free_memory(machine.process) is None, "its use is not known"
    (machine.top / "jobs/one" / current).write_text(f"{3 * GIB}\n")
    assert free_memory(machine.process) == GIB
    (machine.top / "jobs/one" / "memory.stat").write_text(stat)
    assert free_memory(machine.process) == GIB + 120
    machine.has("jobs", GIB, 8 * GIB)
    (machine.top / "jobs" / current).write_text(f"{8 * GIB - 7}\n")
    assert free_memory(machine.process) == 7


@pytest.mark.parametrize(("version", "unlimited"), [(1, UNLIMITED), (2, "max")])
def test_group_above_counts_where_it_allows_less(tmp_path: Path, version: int, unlimited: int | str) -> None:
    machine = Machine(tmp_path, version, group="/pod/container/scope")
    machine.has("pod/container/scope", GIB, unlimited)
    machine.has("pod/container", 2 * GIB, 8 * GIB)
    machine.has("pod", 3 * GIB, 4 * GIB)
    assert memory_use(machine.process) == use(3 * GIB, 4 * GIB, is_own=False)
    machine.has("pod/container/scope", GIB, 4 * GIB)
    assert memory_use(machine.process) == use(GIB, 4 * GIB)


@pytest.mark.parametrize(("version", "unlimited"), [(1, UNLIMITED), (2, "max")])
def test_group_without_a_limit_has_its_peak(tmp_path: Path, version: int, unlimited: int | str) -> None:
    machine = Machine(tmp_path, version, group="/one")
    machine.has("one", GIB, unlimited)
    assert memory_use(machine.process) == use(GIB, None)


def test_whole_machine_is_no_control_group(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1, group="/")
    machine.has(".", 500 * GIB, 512 * GIB)
    machine.is_whole()
    assert memory_use(machine.process) is None


def test_last_mount_of_a_place_is_what_is_seen_there(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1, group="/docker/abc")
    machine.has(".", GIB, 2 * GIB)
    with (machine.process / "mountinfo").open("a") as mounts:
        mounts.write(f"40 31 0:30 /docker/abc {machine.top} rw - cgroup none rw,cpu,memory\n")
    assert memory_use(machine.process) == use(GIB, 2 * GIB)


@pytest.mark.parametrize(
    ("group", "root"), [("/elsewhere", "/docker/abc"), ("/docker", "/docker/abc"), ("/../sibling", "/")]
)
def test_group_that_is_not_to_be_seen_has_no_figures(tmp_path: Path, group: str, root: str) -> None:
    machine = Machine(tmp_path, 2, group=group, root=root)
    machine.has(".", GIB, 2 * GIB)
    assert memory_use(machine.process) is None


@pytest.mark.parametrize(("version", "unlimited"), [(1, -1), (2, "max")])
def test_smallest_quota_of_a_group_and_those_above_counts(tmp_path: Path, version: int, unlimited: int | str) -> None:
    machine = Machine(tmp_path, version, group="/pod/container/scope")
    machine.shares("pod/container/scope", unlimited)
    assert cpu_quota(machine.process) is None
    machine.shares("pod", 800_000)
    machine.shares("pod/container", 175_000, 50_000)
    assert cpu_quota(machine.process) == 3.5
    machine.shares("pod/container/scope", 150_000)
    assert cpu_quota(machine.process) == 1.5


@pytest.mark.parametrize("version", [1, 2])
def test_quota_of_a_container_is_at_the_top_of_what_it_sees(tmp_path: Path, version: int) -> None:
    machine = Machine(tmp_path, version, group="/docker/abc", root="/docker/abc")
    machine.shares(".", 200_000)
    assert cpu_quota(machine.process) == 2.0


@pytest.mark.parametrize(("version", "quota", "period"), [(1, "x", 100_000), (1, 100_000, 0), (2, "x", 1), (2, 1, 0)])
def test_quota_that_says_nothing_is_none(tmp_path: Path, version: int, quota: int | str, period: int) -> None:
    machine = Machine(tmp_path, version, group="/one")
    machine.shares("one", quota, period)
    assert cpu_quota(machine.process) is None
    assert cpu_quota(tmp_path / "absent") is None


@pytest.mark.parametrize(("file", "text"), [("cgroup", ""), ("cgroup", "x\n"), ("mountinfo", "a b c\n")])
def test_listing_that_says_nothing_is_no_error(tmp_path: Path, file: str, text: str) -> None:
    machine = Machine(tmp_path, 2, group="/")
    machine.has(".", GIB, 2 * GIB)
    (machine.process / file).write_text(text)
    assert memory_use(machine.process) is None
    assert memory_use(tmp_path / "absent") is None


@pytest.mark.parametrize(("quota", "expected"), [(None, 8), (0.5, 1), (2.0, 2), (3.9, 3), (64.0, 8)])
def test_usable_cpus_are_those_of_the_affinity_within_the_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int
) -> None:
    monkeypatch.setattr(cgroups, "cpu_quota", lambda: quota)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert cgroups.usable_cpus() == expected
