"""The admin's live page.

metrics.py    reads engines, streams and rows once a second, for all viewers
snapshot.py   what was read, and everything that the page shows of it
headline.py   what it means, in words
delivery.py   the events of one viewer
"""
