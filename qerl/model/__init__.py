"""The decoder, its adapters and its noise: one definition for training and for generation."""
