"""What an answer is worth: answer checking, other reward functions, shaping, and their weighted sum."""
