"""Files of other tools: timelines for Perfetto, SimAI's workloads."""
