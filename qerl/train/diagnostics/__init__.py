"""Measurements that make a run believable: entropy and information on a fixed probe set, mismatch by cause, answers,
output perturbations, and the adapter canary. They read the run and never change it."""
