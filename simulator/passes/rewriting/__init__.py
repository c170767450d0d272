"""What passes are written with: drafts of graphs, nodes to insert, lifetimes, layers, and one rank's share of an op."""
