"""A worker of batches as a program: `python -m tests.support.batch_worker`, with the variables of a site."""

from __future__ import annotations

import asyncio
import signal

import django


async def main() -> None:
    """Run what is queued until SIGTERM."""
    from streamserve.web import site
    from streamserve.web.work.serving import worker_for

    worker = worker_for(site.get_site(), ["batch"], grace_seconds=0.0)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    print("works", flush=True)
    await worker.run()
    await site.reset()


if __name__ == "__main__":
    django.setup()
    asyncio.run(main())
