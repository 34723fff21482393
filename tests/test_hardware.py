"""Memory is what the machine has, or what a container may have of it, whichever is less."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tinyllm import hardware
from tinyllm.hardware import MemoryLimit, memory_limits

GIB = 2**30


def v2(root: Path, group: str, limit: object, usage: int = 0, stat: str = "") -> None:
    write_group(root / "sys/fs/cgroup" / group, "memory.max", limit, "memory.current", usage, stat)


def v1(root: Path, group: str, limit: object, usage: int = 0, stat: str = "") -> None:
    folder = root / "sys/fs/cgroup/memory" / group
    write_group(folder, "memory.limit_in_bytes", limit, "memory.usage_in_bytes", usage, stat)


def write_group(folder: Path, limit_file: str, limit: object, usage_file: str, usage: int, stat: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / usage_file).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(stat)


def member_of(root: Path, *lines: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))


def test_a_machine_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert memory_limits(tmp_path) == []


def test_a_groups_limit_and_those_above_it_are_found_in_version_2(tmp_path: Path) -> None:
    member_of(tmp_path, "0::/pod/app")
    v2(tmp_path, "pod/app", 2 * GIB, GIB, "anon 9\nactive_file 30\ninactive_file 12\n")
    v2(tmp_path, "pod", 3 * GIB, 2 * GIB)
    v2(tmp_path, "other", 1)
    assert memory_limits(tmp_path) == [MemoryLimit(2 * GIB, GIB + 42), MemoryLimit(3 * GIB, GIB)]


def test_no_limit_is_written_as_max_in_version_2(tmp_path: Path) -> None:
    member_of(tmp_path, "0::/app")
    v2(tmp_path, "app", "max", GIB)
    assert memory_limits(tmp_path) == []


def test_the_memory_controller_of_version_1_is_asked_and_no_other(tmp_path: Path) -> None:
    member_of(tmp_path, "9:name=systemd:/x", "5:cpu,cpuacct:/cpu", "4:hugetlb,memory:/docker/app", "0::/")
    v1(tmp_path, "docker/app", 2 * GIB, GIB, "inactive_file 5\ntotal_inactive_file 40\ntotal_active_file 2\n")
    v1(tmp_path, "cpu", 1)
    assert memory_limits(tmp_path) == [MemoryLimit(2 * GIB, GIB + 42)]


def test_a_container_that_sees_its_own_group_as_the_topmost_has_its_limit(tmp_path: Path) -> None:
    member_of(tmp_path, "4:memory:/docker/the-path-outside", "0::/docker/the-path-outside")
    v1(tmp_path, "", GIB, 10)
    v2(tmp_path, "", 2 * GIB, 20)
    assert memory_limits(tmp_path) == [MemoryLimit(GIB, GIB - 10), MemoryLimit(2 * GIB, 2 * GIB - 20)]


def test_a_group_above_its_limit_has_nothing_left(tmp_path: Path) -> None:
    member_of(tmp_path, "0::/")
    v2(tmp_path, "", GIB, 2 * GIB)
    assert memory_limits(tmp_path) == [MemoryLimit(GIB, 0)]


def test_memory_is_what_the_narrowest_limit_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "memory_limits", list)
    total, available = hardware.total_memory(), hardware.available_memory()
    assert total == psutil.virtual_memory().total and 0 < available <= total
    monkeypatch.setattr(hardware, "memory_limits", lambda: [MemoryLimit(2000, 500), MemoryLimit(1000, 900)])
    assert (hardware.total_memory(), hardware.available_memory()) == (1000, 500)
    monkeypatch.setattr(hardware, "memory_limits", lambda: [MemoryLimit(2 * total, 2 * total)])
    assert hardware.total_memory() == total
