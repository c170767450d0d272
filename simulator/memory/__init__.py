"""What a step needs of a device's memory: tensors' lifetimes, the allocator, what a framework adds."""
