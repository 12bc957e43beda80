"""The readers of `benchmarks.qoe` in real time, over HTTP, at real servers. `python -m benchmarks.qoe_http`."""
