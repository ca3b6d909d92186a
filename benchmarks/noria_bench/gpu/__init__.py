"""Everything worth measuring on a GPU, in parts that a rented device can do one by one: `make gpu`."""
