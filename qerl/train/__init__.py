"""The training loop and what it is made of: session, plan, learning pass, optimizer, policy version, resume."""
