"""What is learned: latency laws, features, and predictors of measured over analytical time, with intervals.

Others use ``analytical.latency_us``, ``training.train``, ``registry.Registry`` and ``predictor.load``; a trained model
needs numpy only. Libraries that fit (scikit-learn, LightGBM) and track (MLflow) are loaded inside functions.
"""
