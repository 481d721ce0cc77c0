"""The thing that is trained: model, data, state and the loop that steps it."""
