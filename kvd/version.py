"""The version; that of the distribution is read from here."""

VERSION = "0.1.0"
