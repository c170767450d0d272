"""What one of several tensor, context or expert ranks does of each op, and what its tensors are to the others."""
