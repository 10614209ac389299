"""The simulator: the product's own controller under virtual time, on models of its edges, with faults by seed."""
