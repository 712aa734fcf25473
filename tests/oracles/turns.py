"""Warps of a program as threads of which one runs at a time, each until its next barrier."""

import threading
import time


class Turns:
    """Runs one function for each warp, given its number; `barrier` is what they wait at."""

    def __init__(self, bodies):
        self._bodies, self._errors = bodies, []
        self._running, self._own = threading.Lock(), threading.local()
        self._barriers = {}

    @property
    def number(self):
        """Of the running warp."""
        return self._own.number

    def barrier(self, name, count):
        """Waits until `count` warps are at the barrier of this name."""
        meeting = self._barriers.setdefault(name, threading.Barrier(count))
        self._running.release()
        try:
            meeting.wait(60)
        finally:
            self._running.acquire()

    def until(self, condition):
        """Lets others run until it holds."""
        for _ in range(10_000):
            if condition():
                return
            self._running.release()
            time.sleep(0.001)
            self._running.acquire()
        raise TimeoutError("a warp waits for what no other does")

    def _start(self, number):
        self._own.number = number
        with self._running:
            try:
                self._bodies[number]()
            except BaseException as error:
                self._errors.append(error)
                for meeting in self._barriers.values():
                    meeting.abort()

    def run(self):
        """Until all are through; raises what the first raised."""
        threads = [
            threading.Thread(target=self._start, args=(i,)) for i in range(len(self._bodies))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
