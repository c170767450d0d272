"""A whole training job: days, GPU-hours, price and energy, with what interrupts it (``opcast plan``).

:func:`.run.plan_job` answers a :class:`.request.PlanRequest`; :class:`.answer.PlanReport` is the answer.
"""
