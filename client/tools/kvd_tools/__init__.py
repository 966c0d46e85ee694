"""Programs on the client's side: the demo, the self-test."""
