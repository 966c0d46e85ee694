"""Reading reports: differences, what is wrong, and words for people. Pure, like kvd.broker."""
