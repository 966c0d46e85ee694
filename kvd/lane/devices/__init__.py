"""Device backends of a lane."""
