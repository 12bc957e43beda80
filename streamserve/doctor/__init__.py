"""The doctor: what stands between this site and its readers, by what goes in and what comes out.

`wire` asks an address and notes when each piece arrived; `hops` names the proxies on the way; `checks` compare, and
return verdicts; `answers` does so with real answers; `lines` has the line of configuration that mends a fault in each
proxy; `examination` runs all of it for one address. `manage.py streamserve_doctor` prints the outcome (docs/doctor.md).

It asks no address but those that the operator gives. Threads; the database is read on the caller's thread only.
"""
