"""Read the next batches on one thread while the device works; the order is always that of the steps."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TypeVar

Batch = TypeVar("Batch")


def prefetch(
    read: Callable[[int], Batch], start: int, stop: int | None = None, depth: int = 2
) -> Iterator[tuple[int, Batch]]:
    """Yield (step, read(step)) from `start` to before `stop`, with up to `depth` reads ahead.

    An error of read(step) is raised where that step would have been yielded. To end the thread, close the iterator or
    exhaust it.

    Args:
      read: a pure function of the step, such as TokenStream.batch.
      start: the first step.
      stop: the step after the last; None goes on for ever.
      depth: batches held ready, at least 1.
    """
    steps = iter(range(start, stop) if stop is not None else count(start))
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
    ahead = deque()

    def send():
        step = next(steps, None)
        if step is not None:
            ahead.append((step, pool.submit(read, step)))

    try:
        for _ in range(depth):
            send()
        while ahead:
            step, future = ahead.popleft()
            batch = future.result()
            send()
            yield step, batch
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
