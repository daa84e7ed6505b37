"""Where prompts come from: data sets by name or path, rendering, and a seeded, resumable order."""
