"""Comparing arms: a matrix of runs under one protocol, its statistics, its summaries."""
