"""fault 54: templates are programs from strangers."""

import gc
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tinyllm.errors import ChatTemplateError
from tinyllm.text import template_worker
from tinyllm.text.chat_template import ChatTemplate
from tinyllm.text.template_worker import Limits, TemplateWorker

MESSAGES = [{"role": "user", "content": "hi"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS += "{% endfor %}"
WORKER = TemplateWorker()
HURRIED = TemplateWorker(Limits(seconds=0.3))
SMALL = TemplateWorker(Limits(memory=200 * 2**20))


def render(source, worker=WORKER, **kwargs):
    return ChatTemplate({"default": source}, worker=worker).render(MESSAGES, **kwargs)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'].mro() }}",
        "{{ ('' | attr('__class__')).mro() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ '{a.__class__}' | format_map({'a': ''}) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages[0].content.__init__.__globals__ }}",
        "{% set ns = namespace(__class__=1) %}{{ ns.__class__.__mro__ }}",
        "{% set ns = namespace(a=1) %}{% set ns.__init__ = 1 %}{{ ns.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ strftime_now.__globals__['os'].system('true') }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}",
        "{{ lipsum.__globals__.os }}",
        "{{ dict.__subclasses__() }}",
        "{{ (messages | map(attribute='__class__') | list)[0].__mro__ }}",
    ],
)
def test_a_way_out_of_the_sandbox_is_an_error_of_one_line(source):
    """fault 54."""
    with pytest.raises(ChatTemplateError) as caught:
        render(source)
    assert "\n" not in str(caught.value)


def test_a_template_that_breaks_out_writes_no_file_and_starts_no_process():
    """What the process is still allowed, should Jinja's sandbox have a hole."""
    code = """if True:
        import resource, tinyllm.text.sandbox as sandbox
        sandbox.main(10.0, 2**30, False)  # stdin is empty
        print(resource.getrlimit(resource.RLIMIT_FSIZE), resource.getrlimit(resource.RLIMIT_NPROC))
    """
    done = subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)
    assert done.stdout.split(b"\n")[0] == b"(0, 0) (0, 0)"


# -- limits

DOUBLED = "{% set ns = namespace(s=cycler(1, 2)) %}{% for i in range(60) %}"
DOUBLED += "{% set ns.s = cycler(ns.s.items, ns.s.items) %}{% endfor %}{% set x = ns.s.items %}"
TWICE = DOUBLED + "{% set y = x %}" + DOUBLED
CAPTURED = "{% set ns = namespace(s=[1]) %}{% macro m() %}{% set ns.s = varargs %}{% endmacro %}"
CAPTURED += "{% for i in range(60) %}{{ m(ns.s, ns.s) }}{% endfor %}{{ ns.s }}"
NAMED = "{% set ns = namespace(s=1) %}{% macro m() %}{% set ns.s = kwargs %}{% endmacro %}"
NAMED += "{% for i in range(60) %}{{ m(a=ns.s, b=ns.s) }}{% endfor %}{{ ns.s }}"


@pytest.mark.parametrize(
    "source",
    [
        ENDLESS,
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for x in [1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
        "{{ range(99999) | select('in', range(99999) | list) | list }}",
        "{{ 7 ** (7 ** 10) }}",
        "{{ ('a b' * 4000000) | wordwrap(1) }}",
        DOUBLED + "{{ x ~ '' }}",
        TWICE + "{{ x == y }}",
        TWICE + "{{ [x, y] | sort }}",
        DOUBLED + "{{ 3 in (x | string) }}",
        DOUBLED + "{{ x | tojson }}",
        DOUBLED + "{{ x | pprint }}",
        DOUBLED + "{{ '%s' | format(x) }}",
        CAPTURED,
        NAMED,
    ],
)
def test_what_never_ends_is_ended(source):
    """Each would run for hours: nothing in a template can evade a limit of the operating system."""
    with pytest.raises(
        ChatTemplateError, match=r"^the chat template took more than (0\.3 seconds|1\.0 GiB of memory)$"
    ):
        render(source, HURRIED)


def test_looking_for_variables_is_limited_too():
    """Jinja computes constant expressions when it compiles."""
    with pytest.raises(ChatTemplateError, match=r"more than 0\.3 seconds"):
        ChatTemplate({"default": "{{ 7 ** (7 ** 10) }}"}, worker=HURRIED).reads("x")


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ messages * 10 ** 10 }}",
        "{{ 'a' | center(10000000000) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '{:{w}}'.format(1, w=10 ** 10) }}",
        "{{ [1] | batch(10 ** 10, 'x') | list }}",
        "{{ messages | tojson(indent=10 ** 9) }}",
        "{{ ('a' * 1000000) | replace('', 'b' * 1000000) }}",
        "{{ range(99999) | map('string') | join('x' * 1000000) }}",
        "{% set ns = namespace(s='aa') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set x %}{% for a in range(99999) %}" + "y" * 5000 + "{% endfor %}{% endset %}",
    ],
)
def test_what_takes_too_much_memory_is_ended(source):
    with pytest.raises(ChatTemplateError, match=r"^the chat template took more than 0\.2 GiB of memory$"):
        render(source, SMALL)
    assert render("{{ messages[0].content }}", SMALL) == "hi"  # the program and its next rendering are unharmed


def test_memory_is_limited_where_the_kernel_limits_no_address_space(monkeypatch):
    """As on macOS: this side looks at the process's memory."""
    monkeypatch.setattr(template_worker, "_LIMITS_ADDRESS_SPACE", False)
    worker = TemplateWorker(Limits(seconds=60, memory=100 * 2**20))
    with pytest.raises(ChatTemplateError, match=r"100\.0 MiB of memory"):
        render("{% set x = 'a' * 200000000 %}" + ENDLESS, worker)


def test_processor_time_is_limited_without_a_parent_that_watches(monkeypatch):
    """The parent may be killed while its worker renders."""
    monkeypatch.setattr(template_worker._Watch, "_run", lambda watch: None)
    with pytest.raises(ChatTemplateError, match=r"more than 0\.1 seconds"):
        render(ENDLESS, TemplateWorker(Limits(seconds=0.1)))


def test_a_macro_that_calls_itself_for_ever_is_an_error():
    with pytest.raises(ChatTemplateError, match="calls itself too deeply"):
        render("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")


def test_sizes_of_messages_and_prompts_are_limited():
    worker = TemplateWorker(Limits(size=2000))
    with pytest.raises(ChatTemplateError, match="messages take more than"):
        render("{{ long }}", worker, long="a" * 3000)
    with pytest.raises(ChatTemplateError, match="made more than"):
        render("{{ 'a' * 3000 }}", worker)
    assert render("{{ 'a' * 1000 }}", worker) == "a" * 1000


# -- the process


def test_the_process_is_kept_and_ends_with_its_input():
    worker = TemplateWorker()
    render("a", worker)
    process = worker._process()
    render("b", worker)
    assert worker._process() is process
    process.stdin.close()  # as when this process is killed
    assert process.wait(timeout=60) == 0
    assert render("c", worker) == "c"


@pytest.mark.parametrize("end", ["collected", "closed"])
def test_the_process_leaves_no_zombie(end):
    worker = TemplateWorker()
    worker.start()
    process = worker._process()
    if end == "closed":
        worker.close()
    del worker
    gc.collect()
    assert process.returncode == -signal.SIGKILL  # it was waited for


def test_the_process_gets_no_signal_of_the_terminal():
    WORKER.start()
    assert os.getsid(WORKER._process().pid) != os.getsid(0)


@pytest.fixture
def alarm():
    """Set a function that a signal calls, in the main thread, while it waits for a rendering."""
    previous = signal.getsignal(signal.SIGALRM)

    def set_alarm(function):
        signal.signal(signal.SIGALRM, lambda number, frame: function())
        signal.setitimer(signal.ITIMER_REAL, 0.25)

    yield set_alarm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


def test_an_interrupted_rendering_leaves_nothing_behind(alarm):
    worker = TemplateWorker(Limits(seconds=60))

    def interrupt():
        raise KeyboardInterrupt

    alarm(interrupt)
    with pytest.raises(KeyboardInterrupt):
        render(ENDLESS, worker)
    assert render("next", worker) == "next"


def test_a_process_that_is_killed_is_one_error_and_starts_again(monkeypatch):
    worker = TemplateWorker(Limits(seconds=60))
    # Asked of a process that renders.
    monkeypatch.setattr(template_worker, "_resident_bytes", lambda pid: os.kill(pid, signal.SIGKILL) or 0)
    with pytest.raises(ChatTemplateError, match=r"renders chat templates ended \(status -9\)"):
        render(ENDLESS, worker)
    monkeypatch.undo()
    assert render("next", worker) == "next"


def test_threads_take_turns():
    with ThreadPoolExecutor(8) as pool:
        made = pool.map(lambda number: render("{{ n }}" * 1000, n=f"{number},"), range(40))
        assert list(made) == [f"{number}," * 1000 for number in range(40)]


def test_a_fork_has_a_process_of_its_own():
    code = """if True:
        import os
        from tinyllm.text.template_worker import TemplateWorker
        worker = TemplateWorker()
        first = worker.render("{{ n }}", {"n": 1})
        forked = os.fork()
        print(first, worker.render("{{ n }}", {"n": 2}), flush=True)
        if forked:
            assert os.waitpid(forked, 0)[1] == 0
            print(worker.render("{{ n }}", {"n": 3}))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("1 2\n1 2\n3\n", "")


def test_a_process_that_cannot_be_started_is_an_error_of_the_first_rendering(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/absent/python")
    worker = TemplateWorker()
    worker.start()
    with pytest.raises(ChatTemplateError, match=r"cannot be started: .*/absent/python"):
        render("x", worker)


def test_the_process_imports_jinja_and_little_else():
    """So that it starts in a tenth of a second."""
    code = "import tinyllm.text.sandbox, sys; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"mlx", "numpy", "tokenizers", "psutil", "subprocess", "asyncio"} & set(done.stdout.split())


# -- results


@pytest.mark.parametrize(
    "value", [0.1, 1e300, float("inf"), -0.0, 2**70, None, True, "a\ud800b\udc00", "\0\r\n😀", {1: [None]}]
)
def test_values_go_there_and_back_unchanged(value):
    assert render("{{ x }}", x=value) == str(value)


def test_a_long_conversation_stays_within_the_limits():
    """The limits are far from what people do."""
    source = (
        "{% set ns = namespace(text='') %}{% for m in messages %}"
        "{% set ns.text = ns.text ~ '<' ~ m.role ~ '>' + m.content | trim %}{% endfor %}{{ ns.text }}"
    )
    messages = [{"role": "user", "content": "word " * 50}] * 1000
    assert ChatTemplate({"default": source}, worker=WORKER).render(messages).count("<user>word") == 1000


def test_what_templates_do_is_as_in_jinja():
    source = (
        "{% set a, b = 1, [2, 3] %}{% for x, y in [(1, 2), (a, b)] %}{{ loop.last }}{{ loop.length }}{{ x }}{{ y }}"
        "{% else %}none{% endfor %}{% for x in absent %}{% else %}none{% endfor %}|{{ [a, b] | join(',') }}|"
        "{{ {'a': a} | tojson(indent=2) }}|{{ (messages + [a]) | length }}|{{ dict.fromkeys('ab', 1) }}|"
        "{% if a in (a, b) %}y{% endif %}|{{ a ~ 'x' ~ b }}|{{ '%s-%05d' % ('a', 3) }}|{{ '{:>5}'.format(a) }}|"
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}"
        "{% endfor %}|{% generation %}g{{ a }}{% endgeneration %}|{{ range(5) | select('odd') | list }}|"
        "{{ messages | map(attribute='role') | join }}|{{ 7 // 2 }}{{ 2 ** 3 }}{{ 7 % 4 }}|"
        "{% macro m(n) %}[{{ caller(n) }}]{% endmacro %}{% call(x) m(4) %}{{ x }}{% endcall %}|"
        "{{ 'a' if absent is defined else 'b' }}|{{ absent | default([a]) }}|{{ messages[::-1] | length }}"
    )
    assert render(source) == (
        "False212True21[2, 3]none|1,[2, 3]|{\n  \"a\": 1\n}|2|{'a': 1, 'b': 1}|y|1x[2, 3]|a-00003|    1|013|g1|"
        "[1, 3]|user|383|[4]|b|[1]|1"
    )
