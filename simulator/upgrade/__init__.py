"""What a new release changes in a step, and which few minutes of measuring settle it (``opcast upgrade``).

:func:`.run.plan_upgrade` answers an :class:`.request.UpgradeRequest`; :class:`.answer.UpgradeReport` is the answer.
"""
