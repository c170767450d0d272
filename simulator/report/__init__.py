"""Answers: what a simulated step says, added up from its state."""
