"""What a learned model sees of an op: one float32 matrix per kind, derived from the op and the device alone.

:func:`frame` computes it; :mod:`.families` adds what only a family of kinds has; :data:`REASONS` says of each feature
why it is there.
"""

from .frame import FEATURES_VERSION, Frame, alike, feature_names, features, frame
from .reasons import REASONS, reason, smooth

__all__ = ["FEATURES_VERSION", "REASONS", "Frame", "alike", "feature_names", "features", "frame", "reason", "smooth"]
