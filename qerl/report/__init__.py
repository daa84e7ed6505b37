"""A run folder turned into one self-contained HTML page. Reads run folders only; imports no torch."""
