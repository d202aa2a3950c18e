"""The clock: clusters as descriptions, and the time that programs take on them."""
