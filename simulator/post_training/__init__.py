"""Post-training as a graph of phases: rollout, reward, log-probs, training, weight sync (``opcast posttrain``).

:func:`.run.post_train` answers a :class:`.request.PostTrainRequest`; :class:`.answer.PostTrainReport` is the answer.
"""
