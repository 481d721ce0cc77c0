"""What keeps ranks running on this machine: directly, or under torchrun in pods."""
