"""What goes down to tiers and comes up from them, and when a tier is set aside."""
