"""Open-loop load on a site over HTTP: readers who come whether or not others are served, and read at their own pace.

`visits` and `reading` are pure, and shared with the benchmarks; `requests` speaks HTTP, `run` lets the readers come,
`report` and `chart` show how it went. It knows no Django; `manage.py streamserve_load` is the command.
"""
