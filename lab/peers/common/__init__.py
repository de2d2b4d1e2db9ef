"""What the peers share: the protocol's loop, cases, seeded inputs, clocks. Standard library and numpy."""
