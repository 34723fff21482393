"""The thread that owns an engine. MLX's arrays and streams belong to the thread that made them; queues connect it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import perf_counter

from tinyllm.engine.engine import Engine
from tinyllm.engine.request import Output, Request
from tinyllm.errors import TinyllmError


@dataclass(eq=False)
class Ticket:
    """A submitted request: iterate over it for its outputs, ending with the one that has a `finish_reason`."""

    request: Request
    submitted_at: float
    _cancel: Callable[[Ticket], None]
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
        self._cancel(self)

    def put(self, output: Output | BaseException) -> None:
        """Deliver news, from the engine's thread."""
        self._outputs.put(output)


_Command = Callable[["_Loop"], None]


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
        """Queue a request. An error of its own (too long, say) is raised when the ticket is iterated."""
        ticket = Ticket(request, perf_counter(), self._cancel)
        if not self._finalizer.alive:
            raise RuntimeError("the engine is closed")
        self._commands.put(lambda loop: loop.add(ticket))
        return ticket

    def close(self) -> None:
        """Stop the thread after the step that it is in; twice is no error."""
        self._finalizer()

    def _cancel(self, ticket: Ticket) -> None:
        self._commands.put(lambda loop: loop.cancel(ticket))


def _stop(commands: SimpleQueue[_Command | None], thread: threading.Thread) -> None:
    commands.put(None)
    thread.join()


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
            self._engine = self._load()
        except BaseException as error:  # delivered to the thread that waits for the engine
            self._loaded.put(error)
            return
        self._loaded.put(None)
        while self._obey():
            try:
                for output in self._engine.step():
                    self._deliver(output)
            except Exception as error:  # delivered to every request that it ends
                self._fail_all(error)

    def add(self, ticket: Ticket) -> None:
        try:
            self._tickets[self._engine.add(ticket.request)] = ticket
        except TinyllmError as error:
            ticket.put(error)

    def cancel(self, ticket: Ticket) -> None:
        for request_id in [i for i, known in self._tickets.items() if known is ticket]:
            self._engine.cancel(request_id)
            self._deliver(Output(request_id, None, perf_counter(), "cancelled"))

    def _obey(self) -> bool:
        """Carry out the commands that wait, or wait for one where there is nothing to do; False ends the loop."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.has_work)
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
        for request_id, ticket in self._tickets.items():
            self._engine.cancel(request_id)
            ticket.put(error)
        self._tickets.clear()
