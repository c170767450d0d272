"""How ops are measured: plans of cases, run in child processes into a store. Needs torch, numpy and pyarrow only.

Others use ``plan`` (:func:`.plan.build_plan`), ``campaign`` (:func:`.campaign.run`) and ``environment``.
It imports neither models nor simulator, so that it runs on a bare node: ``python -m opcast.harness PLAN.json STORE``.
"""
