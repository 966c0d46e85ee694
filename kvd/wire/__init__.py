"""Between processes: the sockets that listen, and the messages of links to child processes."""
