"""What a machine lacks to run kvd well: facts gathered at the edge, judged by a table of checks."""
