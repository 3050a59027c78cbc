"""The network check: does every member reach every other one, well enough, before anything is started on them?

Pure. `tournament` says who measures whom when, `measurements` what was seen, `verdict` what is wrong and what to do.
The shells are `agents/probing.py` (one member) and `coordinator/network_check.py` (all of them).
"""
