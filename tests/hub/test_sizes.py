"""Bytes as people read them."""

from __future__ import annotations

from tinyllm.hub.sizes import disk_size, memory_size


def test_sizes_are_written_as_people_read_them() -> None:
    assert [disk_size(n) for n in (0, 999, 1000, 9_940_000, 272_587_747, 2_263_000_000, 10**16)] == [
        "0 bytes", "999 bytes", "1.0 kB", "9.9 MB", "273 MB", "2.3 GB", "10 PB",
    ]  # fmt: skip
    assert [memory_size(n) for n in (2**20, 2**34, 3 * 2**29)] == ["1.0 MiB", "16.0 GiB", "1.5 GiB"]
