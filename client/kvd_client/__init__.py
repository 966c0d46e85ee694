"""kvd_client: what an engine imports to talk to a kvd daemon."""
