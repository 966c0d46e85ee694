"""Programs on the client's side: the demos and the self-test."""
