"""Jobs in processes of their own, beside whatever this one does, and no longer than they may take."""

import multiprocessing
import time


class Processes:
    """work(job) for each job, in up to `count` processes. What such a job returns or raises is what errors() says.

    work: a function of a module, because processes that start anew must find it. They inherit this one's environment.
    """

    def __init__(self, work, jobs, count):
        self._pool = multiprocessing.get_context("spawn").Pool(max(1, min(count, len(jobs))))
        self._running = {job: self._pool.apply_async(_why_not, (work, job)) for job in jobs}

    def errors(self, ends):
        """{job: what went wrong}, once every job is done or time.monotonic() is past `ends`. The processes end."""
        found = {}
        for job, running in self._running.items():
            try:
                why = running.get(max(ends - time.monotonic(), 0))
            except multiprocessing.TimeoutError:
                why = "not done in time"
            if why is not None:
                found[job] = why
        self._pool.terminate()
        self._pool.join()
        return found


def _why_not(work, job):
    """What went wrong, or None. As text: not every error can be sent from one process to another."""
    try:
        work(job)
    except Exception as error:  # of any kind: that of a job is not ours
        return first_line(error)
    return None


def first_line(error):
    return (str(error).strip() or repr(error)).splitlines()[0][:200]
