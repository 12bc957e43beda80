"""Share of readers served at their own pace under overload: the engine beside plain queues and beside upper bounds.

Modules: `workload` (requests and their readers), `readers` (one reader's progress), `score`, `machines` (step costs and
what a request costs), `simulation` (the real core on a fake clock), `contenders`, `bounds`, `results`, `report`,
`step_fit`. `python -m benchmarks.qoe` runs them; `benchmarks.qoe_http` takes the readers to real servers.
"""
