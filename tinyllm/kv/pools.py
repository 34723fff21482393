"""The paged caches of a whole model: a pool for each kind of layer, and one manager of their pages."""

from __future__ import annotations

from collections.abc import Sequence

from tinyllm.config.config import Config
from tinyllm.kv.kinds import layer_kinds
from tinyllm.kv.manager import PageManager, Tables
from tinyllm.kv.paged import UNBOUNDED, PagedSequence, TinyKvPagedCache, TinyKvPagedPool
from tinyllm.kv.pages import PageKind


class KvPools:
    """The pools of one model. `layers` says of each layer which pool it is in, and which of that pool's layers it is.

    `ceilings` are the most pages of each of `layer_kinds(config)`; with `share`, prefixes are kept and shared. With
    `kv_bits` keys and values are packed to as many bits; raises as `cache_format` does where they cannot be.
    """

    def __init__(
        self,
        config: Config,
        page_size: int,
        *,
        ceilings: Sequence[int] | None = None,
        prefill_chunk: int = 256,
        share: bool = False,
        kv_bits: int | None = None,
    ) -> None:
        self.kinds, self.layers = layer_kinds(config, kv_bits)
        self.kv_bits = kv_bits
        kinds = self.kinds
        self._boundary = config.rope_boundary
        self.reaches = tuple(kind.reach for kind in kinds)
        pages = [PageKind(kind.reach, n) for kind, n in zip(kinds, ceilings or [UNBOUNDED] * len(kinds), strict=True)]
        self.manager = PageManager(pages, page_size=page_size, prefill_chunk=prefill_chunk, share=share)
        self.pools = tuple(
            TinyKvPagedPool(
                page_size,
                layers=kind.layers,
                manager=self.manager,
                kind=i,
                states=kind.states,
                bits=kind.bits,
            )
            for i, kind in enumerate(kinds)
        )

    def regime(self, length: int) -> str:
        """Return what names the rotation of a sequence of that length: keys of one are of no use in another."""
        return "" if self._boundary is None or length <= self._boundary else f"from {self._boundary + 1} on"

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(pool.nbytes for pool in self.pools)

    def reset(self) -> None:
        """Drop all arrays and prefixes. No sequence may be left."""
        self.manager.clear()
        for pool in self.pools:
            pool.arrays = []

    def caches(self, tables: Tables | None = None) -> PagedCaches:
        """Return the layers' views of a sequence, by default a new one."""
        return PagedCaches(self, PagedSequence(self.pools, tables))


class PagedCaches(list[TinyKvPagedCache]):
    """The caches of all layers, for one sequence: what concerns all of them is asked of the whole."""

    def __init__(self, pools: KvPools, sequence: PagedSequence) -> None:
        super().__init__(TinyKvPagedCache(pools.pools[kind], layer, sequence) for kind, layer in pools.layers)
        self._pools = pools
        self._sequence = sequence

    def trim(self, n: int) -> None:
        """Forget the last `n` positions.

        Raises ValueError if there are fewer, or if a window's pages that the rest needs are gone already. Where there
        are states, these go back to the end of a page.
        """
        offset = self[0].offset
        if not 0 <= n <= offset:
            raise ValueError(f"cannot trim {n} of {offset} positions")
        manager, tables = self._sequence.manager, self._sequence.tables
        manager.advance(tables, offset)
        left = manager.trim(tables, offset - n)
        for layer in self:
            layer.go_back(left)
        if left != offset - n:
            raise ValueError(
                f"cannot trim {n} of {offset} positions: a window has passed, or a state is kept of whole pages"
                f" alone; {left} are left"
            )

    def fork(self) -> PagedCaches:
        """Return the caches of a second sequence that has the same positions; pages are shared until written to."""
        manager, tables = self._sequence.manager, self._sequence.tables
        manager.advance(tables, self[0].offset)
        return PagedCaches(self._pools, PagedSequence(self._pools.pools, manager.fork(tables), owns=True))

    def release(self) -> None:
        """Give back all pages; the caches are empty then."""
        self._sequence.manager.release(self._sequence.tables)
        for layer in self:
            layer.go_back(0)
