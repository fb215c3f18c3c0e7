import json
import math
import random
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from eqtune.errors import InputError
from eqtune.records import Context, Record
from eqtune.report import KernelRow, RunSummary, kernel_table, render_html, with_records, write_html
from eqtune.report.charts import Size, curve_svg, layout, log_ticks
from eqtune.report.curves import best_so_far, convergence
from eqtune.report.units import binary, count, counted, duration, number, percent, round_duration, times

CONTEXT = Context('{"kind": "llvm"}', "a cpu", 2, "0.27.0")
CONV, ADD = "a" * 16, "b" * 16
DECISION = '{"sketch": "rows", "values": {}}'


def trial(workload, latency_s):
    latencies, error = ((), "timeout") if math.isinf(latency_s) else ((latency_s,), "")
    return Record(workload, DECISION, "[[],[]]", CONTEXT, latencies, error=error)


@pytest.fixture
def summary():
    rows = (
        KernelRow("add", ADD, calls=3, flops=1e6, bytes_moved=4e6, baseline_s=1e-3, tuned_s=1e-3, trials=0),
        KernelRow("conv", CONV, 2, 4e9, 1e6, baseline_s=0.2, tuned_s=0.04, trials=0, sketch="conv2d"),
    )
    empty = RunSummary(
        model="net",
        context=CONTEXT,
        kernels=rows,
        baseline_s=0.41,
        tuned_s=0.09,
        max_abs_error=1e-6,
        max_rel_error=2e-7,
        machine={"name": "a cpu", "threads": 2, "peak_flops_per_s_all": 200e9, "l1_bytes": 49152},
        versions={"eqtune": "0.1.0"},
        overheads_s={"search": 1.0, "build": 4.0, "run": 3.0, "model": 0.5},
        wall_s=10.0,
        command="eqtune tune net.onnx --trials 4",
        seed=5,
    )
    trials = [(CONV, math.inf), (ADD, 2e-3), (CONV, 0.1), (CONV, 0.05), (CONV, 0.07)]
    return with_records(empty, [trial(*one) for one in trials])


# Numbers


def test_what_a_machine_has_is_in_words(summary, tmp_path):
    has = {"tile_flops_per_s": 0.0, "dot_products": ["avx512vnni", "avx2"], "weights_in_memory": False}
    write_html(replace(summary, machine={**summary.machine, **has}), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<dt>dot products</dt><dd>avx512vnni, avx2</dd><dt>weights in memory</dt><dd>no</dd>" in page
    assert "FLOP/s, one thread" not in page


def test_what_follows_from_the_fields(summary):
    add, conv = summary.kernels
    assert conv.speedup == pytest.approx(5)
    assert conv.gflops == pytest.approx(100)
    assert summary.peak_fraction(conv) == pytest.approx(0.5)
    assert summary.kernels_baseline_s == pytest.approx(0.403)
    assert summary.share(conv) == pytest.approx(0.08 / 0.083)
    assert summary.share(conv) + summary.share(add) == pytest.approx(1)
    assert summary.by_time() == [conv, add]
    assert summary.other_s == pytest.approx(1.5)
    assert replace(summary, machine={}).peak_fraction(conv) is None


def test_records_give_trials_failures_and_curves(summary):
    add, conv = summary.kernels
    assert (conv.trials, conv.failed, add.trials, add.failed) == (4, 1, 1, 0)
    assert (summary.trials, summary.failed, summary.errors) == (5, 1, {"timeout": 1})
    assert conv.curve == ((2, 0.1), (3, 0.05), (4, 0.05))
    assert [trials for trials, _ in summary.curve] == [0, 3, 4, 5]
    assert [seconds for _, seconds in summary.curve] == pytest.approx([0.403, 0.203, 0.103, 0.103])


def test_records_of_another_context_or_kernel_do_not_count(summary):
    others = [
        replace(trial(CONV, 1e-9), context=replace(CONTEXT, threads=1)),
        trial("c" * 16, 1e-9),
    ]
    assert with_records(summary, others).trials == 0


def test_imported_schedules_and_prices_are_no_trials(summary):
    """A kernel that the budget did not reach had one trial, and the curve what nobody had measured for the model."""
    priced = [replace(trial(ADD, 1e-9), decision=""), replace(trial(CONV, 1e-9), decision=""), trial(CONV, 0.1)]
    add, conv = with_records(summary, priced).kernels
    assert (add.trials, add.curve) == (0, ())
    assert (conv.trials, conv.curve) == (1, ((1, 0.1),))


def test_best_so_far_keeps_changes_and_the_end():
    assert best_so_far([]) == ()
    assert best_so_far([math.inf, math.inf]) == ()
    assert best_so_far([2.0, 3.0, 1.0]) == ((1, 2.0), (3, 1.0))
    random.seed(0)
    latencies = [random.random() for _ in range(200)]
    points = dict(best_so_far(latencies))
    for trials, best in points.items():
        assert best == min(latencies[:trials])
    assert max(points) == 200


def test_convergence_starts_untuned_and_never_rises():
    trials = [("x", 5.0), ("x", 1.0), ("y", 1.5), ("z", 0.1), ("y", math.inf)]
    curve = convergence(trials, calls={"x": 2, "y": 1}, baselines_s={"x": 2.0, "y": 3.0})
    assert curve == ((0, 7.0), (2, 5.0), (3, 3.5), (5, 3.5))


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (duration(0), "0 s"),
        (duration(812e-9), "812 ns"),
        (duration(45.2e-6), "45.2 us"),
        (duration(2.314e-3), "2.31 ms"),
        (duration(58.14), "58.1 s"),
        (duration(725), "12 min 5 s"),
        (duration(math.inf), "-"),
        (round_duration(5e-5), "50 us"),
        (round_duration(1.5e-3), "1.5 ms"),
        (round_duration(1e-3), "1 ms"),
        (number(1234.6), "1235"),
        (number(0.01234), "0.0123"),
        (count(1.8e9), "1.80 G"),
        (count(5), "5.00"),
        (counted(1, "kernel"), "1 kernel"),
        (counted(2, "kernel"), "2 kernels"),
        (binary(64), "64 B"),
        (binary(2**25 + 2**24), "48 MiB"),
        (percent(0.0123), "1.2"),
        (percent(None), "-"),
        (times(12.9), "12.9x"),
    ],
)
def test_numbers_as_people_read_them(shown, expected):
    assert shown == expected


# JSON


def test_a_summary_survives_json(summary):
    text = json.dumps(summary.to_json(), allow_nan=False)
    assert RunSummary.from_json(json.loads(text)) == summary
    fields = json.loads(text)
    assert fields["kernels"][1]["gflops"] == pytest.approx(100)
    assert fields["kernels"][1]["peak_fraction"] == pytest.approx(0.5)
    assert fields["speedup"] == pytest.approx(0.41 / 0.09)


def test_what_never_ran_survives_json(summary):
    """After `--measure compile-only`, or where an untuned kernel failed, there is no time to write."""
    never = replace(summary.kernels[1], baseline_s=math.inf, tuned_s=math.inf, curve=((1, math.inf),))
    summary = replace(summary, kernels=(summary.kernels[0], never), curve=((0, math.inf), (3, 0.1)))
    again = RunSummary.from_json(json.loads(json.dumps(summary.to_json(), allow_nan=False)))
    assert again == summary
    assert kernel_table(again)
    assert render_html(again)


@pytest.mark.parametrize("change", [{"kernels": 3}, {"context": None}, {"kernels": [{}]}, {"baseline_s": "fast"}])
def test_what_is_no_summary_is_refused(summary, change):
    with pytest.raises(InputError, match="not the summary"):
        RunSummary.from_json(summary.to_json() | change)
    with pytest.raises(InputError, match="not the summary"):
        RunSummary.from_json({})


def test_a_summary_of_an_older_version_is_read(summary):
    fields = summary.to_json()
    del fields["tolerance"]
    for kernel in fields["kernels"]:
        del kernel["measured"]
    assert RunSummary.from_json(fields) == summary


# Text


def test_table_has_a_row_a_kernel_and_the_baseline(summary):
    lines = kernel_table(summary).splitlines()
    assert re.split(r"  +", lines[2]) == [
        "conv", "2", "4.00 G", "200000", "40000", "5.00x", "100", "50.0", "4", "96.4",
    ]  # fmt: skip
    assert lines[3].startswith("add")
    assert lines[5].startswith("2 kernels, all calls")
    closing = "\n".join(lines[6:])
    assert "untuned 410 ms, tuned 90.0 ms, 4.56x faster on a cpu, 2 threads" in closing
    slower = kernel_table(replace(summary, tuned_s=0.82))
    assert "untuned 410 ms, tuned 820 ms, 2.00x slower on a cpu, 2 threads" in slower
    assert "2.0e-07 relative" in closing
    assert "5, of which 1 failed (1 timeout)" in closing
    assert "took 10.0 s: search 1.00 s, build 4.00 s, run 3.00 s, model 500 ms, other 1.50 s" in closing


def test_plain_schedules_and_trials_of_other_forms_are_told(summary):
    summary = replace(summary, plain_baseline=True, spent_trials=12)
    for text in (kernel_table(summary), render_html(summary)):
        assert "7 more of" in text
        assert "plain schedules" in text
        assert "untuned 410" not in text
    assert "Untuned us" not in render_html(summary)
    assert "more of" not in kernel_table(replace(summary, spent_trials=5))


def test_what_the_budget_did_not_reach_is_marked_and_has_no_speedup(summary):
    add, conv = summary.kernels
    partly = replace(summary, kernels=(add, replace(conv, measured=False)))
    lines = kernel_table(partly).splitlines()
    assert re.split(r"  +", lines[2]) == [
        "conv", "2", "4.00 G", "~200000", "~40000", "-", "~100", "~50.0", "4", "~96.4",
    ]  # fmt: skip
    assert "~" not in lines[3]
    assert re.split(r"  +", lines[5])[4:6] == ["~83000", "-"], "a ratio of guesses says nothing"
    assert lines[6].startswith("~ not measured: ")
    page = render_html(partly)
    assert ">~40000</td>" in page
    assert "<p class='note'>~ Not measured" in page
    assert "<td>~83000</td><td>-</td>" in page
    assert json.loads(json.dumps(partly.to_json()))["kernels"][1]["speedup"] is None
    for text in (kernel_table(summary), render_html(summary)):
        assert "~" not in text


def test_the_permitted_difference_stands_beside_the_largest(summary):
    checked = replace(summary, tolerance=1e-4)
    assert "2.0e-07 relative (1.0e-04 permitted), 1.0e-06 absolute" in kernel_table(checked)
    assert "relative to the reference; 1.0e-04 permitted" in render_html(checked)


def test_table_fits_a_terminal_and_keeps_escape_codes_out(summary):
    name = "fused_" + "conv2d_add_relu_" * 9 + "\x1b[31m\n"
    row = replace(summary.kernels[1], name=name, flops=9.99e11, baseline_s=99.0, tuned_s=12.34, trials=99999, calls=999)
    row = replace(row, measured=False)
    text = kernel_table(replace(summary, model="\x1b]0;x\x07", kernels=(row,), interrupted=True))
    assert max(map(len, text.splitlines())) <= 120
    assert "\x1b" not in text
    assert "run the same command again" in text


def test_table_without_a_whole_model(summary):
    text = kernel_table(replace(summary, baseline_s=None, tuned_s=None, max_rel_error=None, wall_s=0.0))
    assert "faster on" not in text
    assert "reference" not in text
    assert "conv" in text


# Charts


def test_layout_places_the_curve_between_the_margins():
    size = Size(width=200, height=100, left=40, right=10, top=5, bottom=20)
    drawn = layout(((1, 1e-2), (3, 1e-3), (10, 1e-3)), baseline_s=1e-1, size=size)
    assert drawn.path[0] == (40 + 150 * 1 / 10, drawn.path[1][1])  # a step: level first, then down
    assert drawn.path[-1][0] == 190
    heights = [y for _, y in drawn.path]
    assert heights == sorted(heights)  # a faster kernel is lower on the chart
    assert size.top <= drawn.baseline_y < heights[0]
    assert heights[-1] <= size.height - size.bottom
    # One decade down is the same distance everywhere: the axis is logarithmic.
    assert heights[-1] - heights[0] == pytest.approx(heights[0] - drawn.baseline_y, abs=0.05)
    labels = dict((label, y) for y, label in drawn.y_ticks)
    assert labels["10 ms"] == heights[0]
    assert len(drawn.y_ticks) <= 6
    assert [label for _, label in drawn.x_ticks] == ["0", "2", "4", "6", "8", "10"]
    assert [x for x, _ in drawn.x_ticks] == [40, 70, 100, 130, 160, 190]
    many = layout(((1, 1e-2), (1000, 1e-3)), baseline_s=1e-1, size=size)
    assert [label for _, label in many.x_ticks] == ["0", "200", "400", "600", "800", "1000"]


@pytest.mark.parametrize(("low", "high"), [(1e-3, 1e-1), (9e-6, 1.1e-5), (1e-9, 1e3), (0.9, 1.2)])
def test_log_ticks_are_round_few_and_inside(low, high):
    ticks = log_ticks(low, high)
    assert 1 <= len(ticks) <= 6
    assert all(low <= tick <= high for tick in ticks)
    assert all(float(f"{tick:.1e}") == pytest.approx(tick, rel=1e-9) for tick in ticks)
    assert ticks == sorted(set(ticks))


def test_a_constant_curve_and_none_at_all_can_be_drawn():
    assert curve_svg((), 1.0, "nothing") == ""
    assert 'class="untuned"' in curve_svg(((1, 1.0),), 1.0, "untuned took as long")
    assert 'class="untuned"' not in curve_svg(((1, 1.0),), math.inf, "nothing was run untuned")
    root = ET.fromstring(curve_svg(((1, 1.0),), 1.0, 'a "title" <&>'))
    assert root.tag == "svg"
    assert root.find("title").text == 'a "title" <&>'


# The page


class _Page(HTMLParser):
    """Collects tags, texts and attributes, and checks that elements close in order."""

    VOID = {"meta", "br", "line", "circle", "polyline", "link", "img"}  # noqa: RUF012

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_page_shows_the_result_and_stands_alone(summary):
    text = render_html(summary)
    page = _Page(text)
    shown = " ".join(page.texts)
    for expected in ("net", "410 ms", "90.0 ms", "4.56x", "1 failed", "conv", "eqtune tune net.onnx"):
        assert expected in shown
    assert "200 GFLOP/s" in shown
    assert "48 KiB" in shown
    assert page.tags.count("svg") == 3
    assert page.tags.count("tr") == 1 + 2 + 1
    assert not {name for name, _ in page.attributes} & {"src", "href", "onclick", "onerror"}
    assert not re.search(r"https?:|url\(|@import", text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_page_takes_nothing_as_markup(summary):
    evil = "</title><script>alert(1)</script><img src=x onerror=alert(1)>\"'$body${title}"
    rows = tuple(replace(row, name=evil, sketch=evil) for row in summary.kernels)
    page = _Page(
        render_html(
            replace(
                summary,
                model=evil,
                kernels=rows,
                command=evil,
                errors={evil: 1},
                machine={evil: evil},
                versions={evil: evil},
                overheads_s={evil: 1.0},
                graph={evil: evil},
                context=replace(CONTEXT, device=evil, target=evil),
            )
        )
    )
    assert page.tags.count("script") == 1
    assert "img" not in page.tags
    assert not {name for name, _ in page.attributes} & {"src", "onerror"}
    assert page.texts.count(evil) >= 6


def test_page_of_an_empty_and_of_an_interrupted_run(summary):
    empty = RunSummary("net", CONTEXT, kernels=())
    assert "0 kernels" in render_html(empty)
    assert "interrupted" in render_html(replace(summary, interrupted=True))
    assert "interrupted" not in render_html(summary)


def test_page_is_written(summary, tmp_path):
    page = tmp_path / "new" / "report.html"
    write_html(summary, page)
    assert page.read_text(encoding="utf-8") == render_html(summary)
    write_html(replace(summary, model="net\udcff"), page)  # of a file whose name is no text
    assert "<h1>net?</h1>" in page.read_text(encoding="utf-8")
    with pytest.raises(InputError, match="cannot be written"):
        write_html(summary, page / "report.html")


def test_a_model_far_slower_than_its_kernels_was_timed_in_a_bad_moment(summary):
    assert "busy" not in kernel_table(summary)
    assert "2.00x what its kernels took one by one (83.0 ms)" in kernel_table(replace(summary, tuned_s=0.166))
