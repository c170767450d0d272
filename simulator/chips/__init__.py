"""One workload on several chips and power caps: speed, price, energy, break-even price (``opcast compare chips``).

:func:`.run.compare_chips` answers a :class:`.request.CompareRequest`; :class:`.answer.ChipsReport` is the answer.
"""
