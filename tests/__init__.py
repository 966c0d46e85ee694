"""The tests. A regular package: some other distribution may have left a package of this name."""
