"""What is shown of a daemon; knows it by its report only."""
