"""The broker process: sockets, descriptors and child processes around `kvd.broker`."""
