"""Products of few rows: numpy's, whatever the shape, the form and the number of threads."""

from __future__ import annotations

import ctypes
import sys
from ctypes import c_float, c_int, c_void_p
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from tinyllm.blas_rows import _library, _threads
from tinyllm.kernels import has_compiler

pytestmark = pytest.mark.skipif(sys.platform != "linux" or not has_compiler(), reason="Linux with g++ alone")

ROW_MAJOR, AS_IT_IS, TURNED = 101, 111, 112
ARGUMENTS = [*[c_int] * 6, c_float, c_void_p, c_int, c_void_p, c_int, c_float, c_void_p, c_int]
Floats = NDArray[np.float32]


class Rows:
    """The library, and how often it handed a product on."""

    def __init__(self, library: Path) -> None:
        self.handed_on = 0
        self._callee = ctypes.CFUNCTYPE(None, *ARGUMENTS)(self._count)  # kept for as long as it may be called
        self._library = ctypes.CDLL(str(library))
        self._library.cblas_sgemm.argtypes = ARGUMENTS

    def use(self, threads: int) -> None:
        self._library.tinyllm_use(self._callee, threads)

    def multiply(self, a: Floats, b: Floats, c: Floats, alpha: float = 1, beta: float = 0) -> None:
        """Let c be alpha * a @ b.T + beta * c; the rows of all three may be apart."""
        (m, k), n = a.shape, len(b)
        left, right, into = (x.strides[0] // 4 for x in (a, b, c))
        pointers = [x.ctypes.data for x in (a, b, c)]
        self._library.cblas_sgemm(
            *(ROW_MAJOR, AS_IT_IS, TURNED, m, n, k),
            *(alpha, pointers[0], left, pointers[1], right, beta, pointers[2], into),
        )

    def call(self, order: int, a_form: int, b_form: int, m: int, k: int) -> None:
        self._library.cblas_sgemm(order, a_form, b_form, m, 0, k, 1, None, k, None, k, 0, None, 1)

    def _count(self, *_: object) -> None:
        self.handed_on += 1


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    library = _library(tmp_path_factory.mktemp("kernels"))
    assert library is not None
    return Rows(library)


class Shape(NamedTuple):
    m: int
    n: int
    k: int


SHAPES = [
    *(Shape(m, 301, 256) for m in range(1, 9)),
    *(Shape(m, 1023, 263) for m in (1, 3, 8)),  # shared, with something left of both
    Shape(2, 1, 256),
    Shape(4, 3, 300),
    Shape(1, 49, 70_000),  # rows longer than a block
]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_numpys(shape: Shape, threads: int, rows: Rows) -> None:
    random = np.random.default_rng(0)
    a = random.standard_normal((shape.m, shape.k + 5), dtype=np.float32)[:, : shape.k]
    b = random.standard_normal((shape.n, shape.k + 3), dtype=np.float32)[:, : shape.k]
    wide = np.full((shape.m, shape.n + 2), np.nan, dtype=np.float32)
    c = wide[:, : shape.n]
    wanted = a.astype(np.float64) @ b.T.astype(np.float64)
    close = {"rtol": 1e-4, "atol": 1e-5 * np.sqrt(shape.k)}
    rows.use(threads)
    before = rows.handed_on
    rows.multiply(a, b, c)
    assert np.allclose(c, wanted, **close)
    rows.multiply(a, b, c, alpha=0.5, beta=2)
    assert np.allclose(c, 2.5 * wanted, **close)
    assert np.isnan(wide[:, shape.n :]).all()
    assert rows.handed_on == before


def test_a_row_is_the_same_number_for_number_alone_and_among_others(rows: Rows) -> None:
    random = np.random.default_rng(1)
    a = random.standard_normal((8, 600), dtype=np.float32)
    b = random.standard_normal((500, 600), dtype=np.float32)
    rows.use(2)
    for m in range(1, 9):
        together, alone = np.empty((m, 500), np.float32), np.empty((1, 500), np.float32)
        rows.multiply(a[:m], b, together)
        rows.multiply(a[m - 1 : m], b, alone)
        assert (together[-1] == alone[0]).all()


@pytest.mark.parametrize(
    "other",
    [
        (102, AS_IT_IS, TURNED, 1, 300),
        (ROW_MAJOR, TURNED, TURNED, 1, 300),
        (ROW_MAJOR, AS_IT_IS, AS_IT_IS, 1, 300),
        (ROW_MAJOR, AS_IT_IS, TURNED, 9, 300),
        (ROW_MAJOR, AS_IT_IS, TURNED, 1, 255),
    ],
    ids=["by columns", "a turned", "b as it is", "many rows", "short rows"],
)
def test_all_else_is_handed_on(other: tuple[int, int, int, int, int], rows: Rows) -> None:
    rows.use(2)
    before = rows.handed_on
    rows.call(*other)
    assert rows.handed_on == before + 1


def test_products_of_several_threads_at_once_are_each_their_own(rows: Rows) -> None:
    """One has the helpers, the others multiply alone."""
    random = np.random.default_rng(2)
    b = random.standard_normal((700, 300), dtype=np.float32)
    rows.use(3)
    wrong: list[int] = []

    def multiply(seed: int) -> None:
        a = np.random.default_rng(seed).standard_normal((2, 300), dtype=np.float32)
        wanted, c = a @ b.T, np.empty((2, 700), np.float32)
        for _ in range(100):
            c[:] = np.nan
            rows.multiply(a, b, c)
            if not np.allclose(c, wanted, rtol=1e-4, atol=1e-3):
                wrong.append(seed)

    threads = [Thread(target=multiply, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("name", ["OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"])
def test_what_limits_a_blas_limits_it(name: str) -> None:
    assert _threads({name: "1"}) == 1
    assert 1 <= _threads({name: "100"}) == _threads({}) <= 8
    assert _threads({name: "many"}) == _threads({name: "-1"}) == _threads({})
