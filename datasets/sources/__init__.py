"""Foreign measurements: one module per source, each from somebody's files to rows of the store."""
