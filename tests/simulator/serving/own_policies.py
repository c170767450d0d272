"""A policy and a router as users write them."""

from opcast.simulator.serving.policies.faster_transformer import faster_transformer


def one_at_a_time(state, rules, rank, batch, now_us):
    """Serve one request after the other."""
    faster_transformer(state, rules._replace(max_seqs=1), rank, batch, now_us)


def always_last(state, setup, slot, first, last):
    """Everything to the last rank."""
    return last - 1


def fails(state, rules, rank, batch, now_us):
    """A policy with a mistake in it."""
    raise KeyError("blocks")


def idle(state, rules, rank, batch, now_us):
    """A policy that serves nobody."""


def nowhere(state, setup, slot, first, last):
    """A rank that is none."""
    return last
