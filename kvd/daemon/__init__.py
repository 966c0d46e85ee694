"""The broker process: sockets, descriptors and lane processes around the decisions of kvd.broker."""
