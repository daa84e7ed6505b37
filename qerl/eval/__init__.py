"""Measuring a declared deployment policy, with intervals."""
