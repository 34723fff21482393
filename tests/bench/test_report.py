"""The four formats, to the letter where people read them."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest

from tinyllm.bench.compare import RULE, Change
from tinyllm.bench.report import FORMATS, Report, as_shown, changes_table
from tinyllm.bench.result import Result, Sample, Subject
from tinyllm.bench.workload import Workload

MODEL = Subject("tiny", 1_500_000, 6 << 20, 5 << 20, 2048, "bf16", "float32", "fused", "paged", 0.5)
PROMPT = Result.of(
    MODEL,
    Workload(512, 0),
    [Sample(t, t, (), 9 << 20, 1024 * 2048) for t in (2.0, 4.0)],
    kv_bytes_read=None,
    bandwidth=1e9,
)
ANSWER = Result.of(
    MODEL,
    Workload(0, 2, depth=256),
    [Sample(0.5, None, (0.2, 0.3), 8 << 20, 512 * 2048)],
    kv_bytes_read=float(1 << 20),
    bandwidth=1e9,
)
REPORT = Report(
    {"backend": "CPU", "chip": "Abacus"}, "tinyllm 1 on an Abacus", 1e9, {"repetitions": 2}, [PROMPT, ANSWER]
)

MD = """\
- tinyllm 1 on an Abacus
- tiny: bf16 weights, computing in float32, mode fused, paged KV cache, loaded in 0.50 s
- memory is read at 1.0 GB/s (measured)

| model |    size | params | backend | test       | batch |            t/s |
| ----- | ------: | -----: | ------- | ---------- | ----: | -------------: |
| tiny  | 6.0 MiB | 1.50 M | CPU     | pp512      |     1 | 192.00 ± 90.51 |
| tiny  | 6.0 MiB | 1.50 M | CPU     | tg2 @ d256 |     1 |    4.00 ± 0.00 |

"""


def test_md_is_the_table_of_llama_bench_with_details_below() -> None:
    text = FORMATS["md"](REPORT)
    assert text.startswith(MD)
    names, _, prompt, answer, *rest = text.removeprefix(MD).splitlines()
    assert len({len(line) for line in (names, prompt, answer)}) == 1

    def cells(line: str) -> list[str]:
        return [cell.strip() for cell in line.strip("|").split("|")]

    first, second = (dict(zip(cells(names), cells(row), strict=True)) for row in (prompt, answer))
    assert first == {
        "test": "pp512",
        "median t/s": "192.00",
        "min … max": "128.00 … 256.00",
        "prefill t/s": "192.00",
        "first token, ms": "3000.0",
        "decode t/s": "-",
        "between tokens p50 / p95 / max, ms": "-",
        "peak memory": "9.0 MiB",
        "KV a token / held, KiB": "2.0 / 4.0",
        "read a token": "-",
        "of bandwidth": "-",
    }
    assert second["between tokens p50 / p95 / max, ms"] == "200.0 / 300.0 / 300.0"
    assert (second["read a token"], second["of bandwidth"], second["first token, ms"]) == ("6.0 MiB", "3%", "-")
    assert rest == ["", "The spread is over 10% of the mean: pp512 (47%)."]


SHOWN = """\
- tinyllm 1 on an Abacus
- tiny: bf16 weights, computing in float32, mode fused, paged
  KV cache, loaded in 0.50 s, 6.0 MiB, 1.50 M parameters
- memory is read at 1.0 GB/s (measured)

| test       | batch |            t/s |
| ---------- | ----: | -------------: |
| pp512      |     1 | 192.00 ± 90.51 |
| tg2 @ d256 |     1 |    4.00 ± 0.00 |

|                        |           pp512 |
| ---------------------- | --------------: |
| median t/s             |          192.00 |
| min … max              | 128.00 … 256.00 |
| prefill t/s            |          192.00 |
| first token, ms        |          3000.0 |
| peak memory            |         9.0 MiB |
| KV a token / held, KiB |       2.0 / 4.0 |

|                                    |            tg2 @ d256 |
| ---------------------------------- | --------------------: |
| median t/s                         |                  4.00 |
| min … max                          |           4.00 … 4.00 |
| decode t/s                         |                  4.00 |
| between tokens p50 / p95 / max, ms | 200.0 / 300.0 / 300.0 |
| peak memory                        |               8.0 MiB |
| KV a token / held, KiB             |             2.0 / 4.0 |
| read a token                       |               6.0 MiB |
| of bandwidth                       |                    3% |

The spread is over 10% of the mean: pp512 (47%).
"""


def test_a_terminal_shows_the_same_in_tables_that_it_is_wide_enough_for() -> None:
    assert as_shown(REPORT, 62) == SHOWN
    side_by_side = as_shown(REPORT, 80)
    assert "|                                    |           pp512 |            tg2 @ d256 |\n" in side_by_side
    assert max(map(len, side_by_side.splitlines())) <= 80
    assert as_shown(REPORT, 500) == FORMATS["md"](REPORT)


def test_a_terminal_shows_of_changes_what_tells_them_apart() -> None:
    changes = [Change("tiny", "fused", "paged", test, 1, 200.0, 150.0, -0.25, True) for test in ("pp8", "tg4")]
    table = changes_table(changes, 80)
    assert table.startswith("| test | old t/s | new t/s | change | beyond the noise |\n")
    assert max(map(len, table.splitlines())) <= 80
    assert changes_table(changes, 120).startswith("| model | features | kv    | test | batch |")
    apart = changes_table([changes[0], replace(changes[1], kv="dense")], 80)
    assert apart.startswith("| kv    | test | old t/s |")


def test_features_have_a_column_where_there_are_several() -> None:
    slow = replace(PROMPT, model=replace(MODEL, features="reference"))
    text = FORMATS["md"](replace(REPORT, results=[PROMPT, slow]))
    assert "| backend | features  | test  |" in text and "| CPU     | reference | pp512 |" in text
    assert "fused pp512 (47%), reference pp512 (47%)" in text


def test_a_cache_has_a_column_and_a_batch_says_what_each_row_does() -> None:
    dense = replace(MODEL, kv="dense")
    batch = replace(ANSWER, model=dense, workload=replace(ANSWER.workload, batch=4))
    text = FORMATS["md"](replace(REPORT, results=[ANSWER, batch]))
    assert "| backend | kv    | test       | batch |" in text and "| CPU     | dense | tg2 @ d256 |     4 |" in text
    assert "| decode t/s | a row |" in text and "|       4.00 |  1.00 |" in text
    assert "dense tg2 @ d256 x 4" in text
    assert "a row" not in FORMATS["md"](REPORT)


def test_an_impossible_share_of_the_bandwidth_is_explained() -> None:
    assert "busier" not in FORMATS["md"](REPORT)
    assert "busier" in FORMATS["md"](replace(REPORT, results=[replace(ANSWER, bandwidth_share=1.2)]))


def test_json_keeps_every_sample() -> None:
    report = json.loads(FORMATS["json"](REPORT))
    assert report["machine"] == {"backend": "CPU", "chip": "Abacus", "bandwidth_bytes_per_s": 1e9}
    assert report["settings"] == {"repetitions": 2}
    prompt, answer = report["results"]
    assert (prompt["test"], answer["test"]) == ("pp512", "tg2 @ d256")
    assert [sample["ttft_s"] for sample in prompt["samples"]] == [2.0, 4.0]
    assert answer["samples"][0]["gaps_s"] == [0.2, 0.3]
    assert (prompt["model"]["name"], prompt["decode_tps"]) == ("tiny", None)
    assert answer["workload"] == {"prompt": 0, "generate": 2, "depth": 256, "batch": 1}
    assert "changes" not in report


def test_jsonl_is_one_whole_object_a_test() -> None:
    lines = [json.loads(line) for line in FORMATS["jsonl"](REPORT).splitlines()]
    whole = json.loads(FORMATS["json"](REPORT))
    assert lines == [{**{k: whole[k] for k in ("machine", "settings")}, **row} for row in whole["results"]]


def test_csv_has_the_same_columns_whatever_a_test_measures() -> None:
    both = list(csv.DictReader(io.StringIO(FORMATS["csv"](REPORT))))
    assert [row["test"] for row in both] == ["pp512", "tg2 @ d256"]
    assert (both[0]["ttft_s_min"], both[0]["gaps_p95_s"], both[0]["model_name"]) == ("2.0", "", "tiny")
    assert (both[1]["ttft_s_min"], both[1]["gaps_p95_s"], both[1]["workload_depth"]) == ("", "0.3", "256")
    for alone in (PROMPT, ANSWER):
        [row] = csv.DictReader(io.StringIO(FORMATS["csv"](replace(REPORT, results=[alone]))))
        assert list(row) == list(both[0])


@pytest.mark.parametrize("form", ["md", "json"])
def test_changes_are_part_of_the_report(form: str) -> None:
    change = Change("tiny", "fused", "paged", "pp512", 1, 200.0, 150.0, -0.25, True)
    text = FORMATS[form](replace(REPORT, changes=[change]))
    if form == "json":
        assert json.loads(text)["changes"][0]["beyond_noise"] is True
    else:
        assert text.splitlines()[-3:] == [
            "| tiny  | fused    | paged | pp512 |     1 |  200.00 |  150.00 | -25.0% | yes              |",
            "",
            RULE,
        ]


def test_no_table_is_wider_than_its_place_however_long_a_name_is() -> None:
    long = replace(MODEL, name="somebody/" + "a-long-name-" * 8 + "4bit")
    results = [PROMPT, ANSWER, replace(PROMPT, model=long), replace(ANSWER, model=long)]
    shown = as_shown(replace(REPORT, results=results), 100)
    tables = [line for line in shown.splitlines() if line.startswith("|")]
    assert max(map(len, tables)) <= 100
    assert sum("-4bit pp512 " in line for line in tables) == 1  # what tells tests apart is at the end of their names
    narrow = as_shown(REPORT, 40)
    assert " pp512 |" in narrow and " tg2 @ d256 |" in narrow  # nothing is left out of a short name
