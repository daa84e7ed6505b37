"""From scored groups to the number that is differentiated: advantages, group kinds, packing, the clipped surrogate."""
