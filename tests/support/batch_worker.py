"""A worker that runs the batches of the site that the settings name, until SIGTERM: `python -m …batch_worker`."""

from __future__ import annotations

import asyncio
import signal

import django


async def main() -> None:
    """Run what is queued; give back what runs when the signal comes."""
    from streamserve.web import site
    from streamserve.web.work.serving import worker_for

    worker = worker_for(site.get_site(), ["batch"])
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    await worker.run()
    await site.reset()


if __name__ == "__main__":
    django.setup()
    asyncio.run(main())
