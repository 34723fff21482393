"""The thread that owns an engine. MLX's arrays and streams belong to the thread that made them; queues connect it."""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TypeVar, cast

from tinyllm._mx import mx
from tinyllm.engine.engine import Engine
from tinyllm.engine.request import Output, Request
from tinyllm.malloc import return_freed_memory

T = TypeVar("T")
_Command = Callable[["_Loop"], None]


@dataclass(eq=False)
class Ticket:
    """A submitted request: iterate over it for its outputs, ending with the one that has a `finish_reason`."""

    request: Request
    submitted_at: float
    _commands: SimpleQueue[_Command | None]  # not the worker: the thread, which has tickets, would keep it alive
    _outputs: SimpleQueue[Output | BaseException] = field(default_factory=SimpleQueue)

    def __iter__(self) -> Iterator[Output]:
        """Yield outputs as they come; raises what ended the request if that was an error."""
        while True:
            output = self._outputs.get()
            if isinstance(output, BaseException):
                raise output
            if output.error is not None:
                raise output.error
            yield output
            if output.finish_reason is not None:
                return

    def cancel(self) -> None:
        """Ask the engine to forget the request. Outputs that are under way may still arrive."""
        self._commands.put(lambda loop: loop.cancel(self))

    def put(self, output: Output | BaseException) -> None:
        """Deliver news, from the engine's thread."""
        error = output if isinstance(output, BaseException) else output.error
        if error is not None:
            _clear_variables(error)
        self._outputs.put(output)


class EngineWorker:
    """Loads an engine in a thread of its own, and steps it there while there is work.

    Raises in the caller what `load` raises.
    """

    def __init__(self, load: Callable[[], Engine]) -> None:
        self._commands: SimpleQueue[_Command | None] = SimpleQueue()
        loaded: SimpleQueue[BaseException | None] = SimpleQueue()
        loop = _Loop(load, self._commands, loaded)
        self._thread = threading.Thread(target=loop.run, name="tinyllm-engine", daemon=True)
        self._thread.start()
        # Also at the end of the process: MLX must not be computing while the interpreter is torn down.
        self._finalizer = weakref.finalize(self, _stop, self._commands, self._thread)
        failure = loaded.get()
        if failure is not None:
            self.close()
            raise failure

    def submit(self, request: Request) -> Ticket:
        """Queue a request. An error of its own (too long, say) is raised when the ticket is iterated.

        Raises RuntimeError where there is no engine: after `close`, and in a forked process.
        """
        ticket = Ticket(request, perf_counter(), self._commands)
        self._commands.put(lambda loop: loop.add(ticket))
        # Asked after the command was queued: what comes before the end of the queue is always answered.
        if not (self._finalizer.alive and self._thread.is_alive()):
            raise RuntimeError("the engine is closed")
        return ticket

    def call(self, function: Callable[[Engine], T]) -> T:
        """Run a function on the engine, in its thread and between steps, and return or raise what it does.

        Raises RuntimeError where there is no engine.
        """
        done: SimpleQueue[tuple[T | None, Exception | None]] = SimpleQueue()

        def command(loop: _Loop) -> None:
            try:
                done.put((function(loop.engine), None))
            except Exception as error:
                _clear_variables(error)
                done.put((None, error))

        self._commands.put(command)
        if not (self._finalizer.alive and self._thread.is_alive()):
            raise RuntimeError("the engine is closed")
        result, error = done.get()
        if error is not None:
            raise error
        return cast(T, result)

    def close(self) -> None:
        """Cancel every request, stop the thread after the step that it is in, free its memory; twice is no error."""
        self._finalizer()


def _stop(commands: SimpleQueue[_Command | None], thread: threading.Thread) -> None:
    commands.put(None)
    if thread is not threading.current_thread():  # garbage may be collected anywhere
        thread.join()


def _clear_variables(error: BaseException) -> None:
    """Empty the frames of an error's traceback, which would keep the model and a cache alive as long as the error."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__context__


class _Loop:
    """What runs in the thread. It knows the worker's queues but not the worker, which can thus be collected."""

    def __init__(
        self,
        load: Callable[[], Engine],
        commands: SimpleQueue[_Command | None],
        loaded: SimpleQueue[BaseException | None],
    ) -> None:
        self._load = load
        self._commands = commands
        self._loaded = loaded
        self._tickets: dict[int, Ticket] = {}

    def run(self) -> None:
        try:
            self.engine = self._load()
            del self._load  # and what it has been given
        except BaseException as error:  # delivered to the thread that waits for the engine
            _clear_variables(error)
            self._loaded.put(error)
        else:
            self._loaded.put(None)
            self._serve()
            self.engine.close()
            del self.engine
        # What this thread has compiled goes before its streams do: left to the end of the thread, the two go in an
        # order that can end the process with std::terminate.
        mx.clear_streams()
        mx.clear_cache()
        return_freed_memory()

    def _serve(self) -> None:
        while self._obey():
            try:
                for output in self.engine.step():
                    self._deliver(output)
            except Exception as error:  # delivered to every request that it ends
                self._fail_all(error)
        for ticket in list(self._tickets.values()):
            self.cancel(ticket)

    def add(self, ticket: Ticket) -> None:
        try:
            self._tickets[self.engine.add(ticket.request)] = ticket
        except Exception as error:  # of whatever kind: the thread must outlive it
            ticket.put(error)

    def cancel(self, ticket: Ticket) -> None:
        for request_id in [i for i, known in self._tickets.items() if known is ticket]:
            self.engine.cancel(request_id)
            self._deliver(Output(request_id, None, perf_counter(), "cancelled"))

    def _obey(self) -> bool:
        """Carry out the commands that wait, or wait for one where there is nothing to do; False ends the loop."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_work)
            except Empty:
                return True
            if command is None:
                return False
            command(self)

    def _deliver(self, output: Output) -> None:
        done = output.finish_reason is not None
        ticket = self._tickets.pop(output.request_id) if done else self._tickets[output.request_id]
        ticket.put(output)

    def _fail_all(self, error: Exception) -> None:
        self.engine.reset()
        for ticket in self._tickets.values():
            ticket.put(error)
        self._tickets.clear()
