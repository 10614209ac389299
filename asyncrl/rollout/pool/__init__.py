"""Several engines as one: routing, watching, bringing back, and new weights to all of them."""
